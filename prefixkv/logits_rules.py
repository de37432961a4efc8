"""What a request's parameters ask of its logits, in the ids of one model; pure Python.

The rules are fixed for a request and shared by all its branches. What differs from token to token,
the tokens so far, is given to them.
"""

from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from prefixkv.errors import InvalidRequest
from prefixkv.sampling_params import SamplingParams

Word = tuple[int, ...]


class TextEncoder(Protocol):
    """What the rules need of a tokenizer."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of `text`."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class LogitsRules:
    """Rules that change logits before a token is chosen from them.

    Attributes:
        bias_ids, bias: parallel, typecodes "q" and "d"; each id once.
        allowed_ids: all others are excluded; typecode "q", empty if all are allowed.
        end_ids: tokens that would end the output, excluded until it has `min_tokens`.
        bad_ids: bad words of one token.
        bad_words: longer ones, by the last token but one.
    """

    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    bias_ids: "array[int]"
    bias: "array[float]"
    allowed_ids: "array[int]"
    min_tokens: int
    end_ids: tuple[int, ...]
    bad_ids: tuple[int, ...]
    bad_words: Mapping[int, tuple[Word, ...]]

    @property
    def penalise_output(self) -> bool:
        """Whether logits depend on which tokens the output has."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0

    def apply_after(self, num_output_tokens: int) -> bool:
        """Whether any rule may change the logits after so many tokens of output."""
        return bool(
            num_output_tokens < self.min_tokens
            or self.penalise_output
            or self.repetition_penalty != 1
            or self.bias_ids
            or self.allowed_ids
            or self.bad_ids
            or self.bad_words
        )

    def excluded(self, tokens: Sequence[int], num_prompt_tokens: int) -> list[int]:
        """Return the ids that may not come after `tokens`, some perhaps twice.

        O(bad words that go on after the last token).

        Args:
            tokens: prompt and output so far.
        """
        num_output_tokens = len(tokens) - num_prompt_tokens
        ids = list(self.bad_ids)
        if num_output_tokens < self.min_tokens:
            ids += self.end_ids
        if num_output_tokens:
            for word in self.bad_words.get(tokens[-1], ()):
                length = len(word) - 1
                if length <= num_output_tokens and tuple(tokens[-length:]) == word[:-1]:
                    ids.append(word[-1])
        return ids


def compile_rules(
    params: SamplingParams,
    tokenizer: TextEncoder,
    *,
    eos_token_ids: Collection[int],
    vocab_size: int,
) -> LogitsRules | None:
    """Return the rules of a request, or None if its parameters leave logits alone.

    Args:
        eos_token_ids: the model's own end tokens.

    Raises:
        InvalidRequest: an id is out of the vocabulary, or the rules leave no token to choose.
    """
    for name in ("logit_bias", "allowed_token_ids"):
        _check_ids(name, getattr(params, name) or (), vocab_size)
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
    words = _shortest({form for word in params.bad_words for form in _forms(word, tokenizer)})
    rules = LogitsRules(
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        bias_ids=array("q", params.logit_bias),
        bias=array("d", params.logit_bias.values()),
        allowed_ids=array("q", sorted(set(params.allowed_token_ids or ()))),
        min_tokens=params.min_tokens,
        end_ids=tuple(sorted(token_id for token_id in ends if token_id < vocab_size)),
        bad_ids=tuple(word[0] for word in words if len(word) == 1),
        bad_words=_by_last_but_one([word for word in words if len(word) > 1]),
    )
    if not rules.apply_after(0):
        return None
    if rules.allowed_ids and not set(rules.allowed_ids).difference(rules.excluded((), 0)):
        raise InvalidRequest(
            f"allowed_token_ids has {len(rules.allowed_ids)} token ids, and bad_words and "
            "min_tokens exclude all of them",
            "allowed_token_ids",
        )
    return rules


def _check_ids(param: str, ids: Collection[int], vocab_size: int) -> None:
    largest = max(ids, default=0)
    if largest >= vocab_size:
        raise InvalidRequest(
            f"{param} has the token id {largest:.6g}; ids are in [0, {vocab_size})", param
        )


def _forms(word: str, tokenizer: TextEncoder) -> set[Word]:
    """Return the word's tokens as it is given, without a space in front, and with one."""
    bare = word.lstrip(" ")
    texts = {word, bare, f" {bare}"} if bare else {word}
    ids = {tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts}
    return {form for form in ids if form}


def _shortest(words: Collection[Word]) -> list[Word]:
    """Leave out words that end with another one: they are excluded with that."""
    return sorted(
        word for word in words if not any(word[start:] in words for start in range(1, len(word)))
    )


def _by_last_but_one(words: Sequence[Word]) -> dict[int, tuple[Word, ...]]:
    grouped: dict[int, tuple[Word, ...]] = {}
    for word in words:
        grouped[word[-2]] = (*grouped.get(word[-2], ()), word)
    return grouped
