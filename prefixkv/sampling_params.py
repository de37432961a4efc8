"""How a request wants its tokens chosen, and when it wants to stop."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from prefixkv.errors import InvalidRequest

MAX_BRANCHES = 1024
MAX_STOP_STRINGS = 64
MAX_BAD_WORDS = 128
MAX_LOGPROBS = 20
MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping of one request; validated once, here.

    The draw of a token depends only on (seed, branch, position), so a request with a seed gives
    the same tokens whatever else is in its batch, up to the last bits of the logits.

    Args:
        n: outputs that are returned; with `use_beam_search`, the width of the beam too.
        best_of: outputs that are drawn, of which the `n` of the highest mean log-probability are
            returned; None draws `n`.
        use_beam_search: search for the likeliest outputs; nothing is drawn then, the parameters of
            drawing are ignored, and those that change logits are refused.
        length_penalty: a beam's score is its log-probability / its length ** length_penalty.
        early_stopping: when a search ends, as `transformers` has it: True as soon as `n` beams
            have ended, False when none is likely to become better, "never" when none can.
        temperature: 0 means greedy.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of most likely tokens whose mass reaches top_p; in (0, 1].
        min_p: drop tokens less likely than min_p times the likeliest; in [0, 1].
        presence_penalty: subtracted from the logit of each token of the output; in [-2, 2].
        frequency_penalty: subtracted once per occurrence in the output; in [-2, 2].
        repetition_penalty: divides the logits > 0 of the tokens of prompt and output, and
            multiplies the others; > 0, and 1 changes nothing.
        logit_bias: added to the logits of token ids; each in [-100, 100].
        allowed_token_ids: only these can be chosen; None allows all.
        bad_words: texts that the output does not have, alone or after a space. The last token of
            one is excluded where it would complete the word; the prompt's tokens do not count.
        seed: None draws one at random per request.
        max_tokens: None means all that the context and the pool leave.
        min_tokens: before these are there, no end token, stop token or stop string ends the output.
        stop: strings that end the output; they are not part of it.
        stop_token_ids: tokens that end the output besides the model's own end tokens.
        include_stop_str_in_output: the text ends with the stop string or token that ended it.
        ignore_eos: go on after the model's end tokens (not after `stop_token_ids`).
        logprobs: None, or how many of the likeliest tokens have their log-probability returned
            at each position, besides the chosen token; at most 20.
        prompt_logprobs: the same for the positions of the prompt.

    Raises:
        InvalidRequest: naming the field, its value and the allowed range.
    """

    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        _check_branches(self)
        _check_draw(self)
        _check_penalties(self)
        _check_vocabulary(self)
        _check_length(self)
        _check_logprobs(self)
        # the caller's own dict may change later, unchecked
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))

    @property
    def num_branches(self) -> int:
        """Branches that run: as many as are drawn from, or the width of the beam."""
        return self.best_of or self.n

    @property
    def is_ranked(self) -> bool:
        """Whether outputs can be returned only when all are there."""
        return self.use_beam_search or self.num_branches > self.n

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0 or self.top_k == 1


def _check_branches(params: SamplingParams) -> None:
    check, n, best_of = _refuse_unless, params.n, params.best_of
    check(_is_int(n) and 1 <= n <= MAX_BRANCHES, "n", n, f"an integer in [1, {MAX_BRANCHES}]")
    if best_of is not None:
        check(_is_int(best_of) and n <= best_of <= MAX_BRANCHES, "best_of", best_of,
              f"an integer in [n, {MAX_BRANCHES}]; n is {n}")  # fmt: skip
    check(isinstance(params.use_beam_search, bool), "use_beam_search", params.use_beam_search,
          "true or false")  # fmt: skip
    check(_finite(params.length_penalty), "length_penalty", params.length_penalty,
          "a finite number")  # fmt: skip
    early = params.early_stopping
    check(isinstance(early, bool) or early == "never", "early_stopping", early,
          'true, false or "never"')  # fmt: skip
    if params.use_beam_search:
        check(best_of in (None, n), "best_of", best_of, "absent, or n, with use_beam_search")


def _check_draw(params: SamplingParams) -> None:
    check = _refuse_unless
    temperature, top_k, seed = params.temperature, params.top_k, params.seed
    check(_finite(temperature) and temperature >= 0, "temperature", temperature,
          "a finite number >= 0")  # fmt: skip
    check(_is_int(top_k) and top_k >= -1, "top_k", top_k, "an integer >= -1")
    check(_finite(params.top_p) and 0 < params.top_p <= 1, "top_p", params.top_p, "in (0, 1]")
    check(_finite(params.min_p) and 0 <= params.min_p <= 1, "min_p", params.min_p, "in [0, 1]")
    if seed is not None:
        check(_is_int(seed) and abs(seed) <= MAX_SEED, "seed", seed,
              f"an integer of at most {MAX_SEED} in magnitude")  # fmt: skip


def _check_penalties(params: SamplingParams) -> None:
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(params, name)
        _refuse_unless(_finite(value) and -2 <= value <= 2, name, value, "in [-2, 2]")
    repetition = params.repetition_penalty
    _refuse_unless(_finite(repetition) and repetition > 0, "repetition_penalty", repetition,
                   "a finite number > 0")  # fmt: skip


def _check_vocabulary(params: SamplingParams) -> None:
    check = _refuse_unless
    bias, allowed = params.logit_bias, params.allowed_token_ids
    check(_is_mapping(bias) and _is_ids(bias), "logit_bias", bias,
          "a mapping from token ids >= 0")  # fmt: skip
    for token_id, value in bias.items():
        check(_finite(value) and -100 <= value <= 100, "logit_bias", {token_id: value},
              "in [-100, 100] for each token id")  # fmt: skip
    if allowed is not None:
        check(_is_ids(allowed) and len(allowed) > 0, "allowed_token_ids", allowed,
              "at least one token id, each >= 0")  # fmt: skip
    check(_is_texts(params.bad_words), "bad_words", params.bad_words,
          "a tuple of non-empty strings")  # fmt: skip
    check(len(params.bad_words) <= MAX_BAD_WORDS, "bad_words", len(params.bad_words),
          f"at most {MAX_BAD_WORDS} strings")  # fmt: skip


def _check_length(params: SamplingParams) -> None:
    check = _refuse_unless
    longest, shortest = params.max_tokens, params.min_tokens
    if longest is not None:
        check(_is_int(longest) and longest >= 1, "max_tokens", longest, "an integer >= 1")
    check(_is_int(shortest) and shortest >= 0, "min_tokens", shortest, "an integer >= 0")
    check(longest is None or shortest <= longest, "min_tokens", shortest,
          f"at most max_tokens, which is {longest}")  # fmt: skip
    check(_is_texts(params.stop), "stop", params.stop, "a tuple of non-empty strings")
    check(len(params.stop) <= MAX_STOP_STRINGS, "stop", len(params.stop),
          f"at most {MAX_STOP_STRINGS} strings")  # fmt: skip
    check(_is_ids(params.stop_token_ids), "stop_token_ids", params.stop_token_ids,
          "token ids >= 0")  # fmt: skip


def _check_logprobs(params: SamplingParams) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None:
            _refuse_unless(_is_int(value) and 0 <= value <= MAX_LOGPROBS, name, value,
                           f"an integer in [0, {MAX_LOGPROBS}]")  # fmt: skip


def _finite(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)  # type: ignore[arg-type] # narrowed just above


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_mapping(value: object) -> bool:
    return isinstance(value, Mapping)


def _is_ids(values: object) -> bool:
    return isinstance(values, Iterable) and all(_is_int(value) and value >= 0 for value in values)


def _is_texts(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(text, str) and text for text in value)


def _refuse_unless(ok: bool, param: str, value: object, allowed: str) -> None:
    if not ok:
        raise InvalidRequest(f"{param} is {value!r:.200}; it must be {allowed}", param)
