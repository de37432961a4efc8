"""Rules are a request's parameters in token ids; what cannot be meant is refused with numbers."""

from typing import Any

import pytest

from prefixkv.errors import InvalidRequest
from prefixkv.logits_rules import LogitsRules, compile_rules
from prefixkv.sampling_params import SamplingParams

VOCAB_SIZE = 60
SPACE, SPACED_A = 52, 53


class Letters:
    """One token a letter, one for a space, and one for an "a" that follows a space."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = [50] if add_special_tokens else []
        for char in text:
            if char == "a" and ids and ids[-1] == SPACE:
                ids[-1] = SPACED_A
            else:
                ids.append(SPACE if char == " " else ord(char) - ord("a"))
        return ids


def compiled(**params: Any) -> LogitsRules | None:
    return compile_rules(
        SamplingParams(**params), Letters(), eos_token_ids=[51, 99], vocab_size=VOCAB_SIZE
    )


def rules(**params: Any) -> LogitsRules:
    made = compiled(**params)
    assert made is not None
    return made


def excluded(tokens: list[int], num_prompt_tokens: int = 0, **params: Any) -> list[int]:
    return sorted(set(rules(**params).excluded(tokens, num_prompt_tokens)))


def test_parameters_that_leave_logits_alone_give_no_rules() -> None:
    assert compiled(temperature=0.5, top_k=3, top_p=0.5, min_p=0.1, logprobs=5, stop=("a",)) is None
    assert compiled(repetition_penalty=1.0, logit_bias={}, bad_words=(), min_tokens=0) is None


def test_a_word_is_excluded_alone_and_after_a_space() -> None:
    """In whichever form it is given; a form that ends with another one needs no rule of its own."""
    for word in ("a", " a", "   a"):
        assert excluded([], bad_words=(word,)) == [0, SPACED_A]
    assert excluded([], bad_words=("b", " b")) == [1]
    assert excluded([], bad_words=(" ",)) == [SPACE]


def test_a_word_of_several_tokens_is_excluded_where_it_would_be_complete() -> None:
    words: Any = {"bad_words": ("bcd", "cd", "xcb", "bab")}

    assert excluded([1, 2], **words) == [3]
    assert excluded([23, 2], **words) == [1, 3]
    assert excluded([1], **words) == []
    assert excluded([1, 0], **words) == [1]
    assert excluded([SPACED_A, 0], **words) == []


def test_only_tokens_of_the_output_begin_a_bad_word() -> None:
    assert excluded([1, 2], 1, bad_words=("bcd",)) == []
    assert excluded([1, 1, 2], 1, bad_words=("bcd",)) == [3]
    assert excluded([2], 1, bad_words=("cd",)) == []


def test_end_tokens_are_excluded_until_there_are_enough() -> None:
    """The model's own and the request's; those that the logits have no place for are left out."""
    params: Any = {"min_tokens": 2, "stop_token_ids": (7, 1000)}

    assert excluded([5], 1, **params) == [7, 51]
    assert excluded([5, 51], 1, **params) == [7, 51]
    assert excluded([5, 51, 51], 1, **params) == []
    assert excluded([5], 1, **params, ignore_eos=True) == [7]
    assert rules(**params).apply_after(1)
    assert not rules(**params).apply_after(2)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logit_bias": {3: 1, 60: 1}}, r"^logit_bias has the token id 60; ids are in \[0, 60\)"),
        ({"allowed_token_ids": (1, 600)}, "^allowed_token_ids has the token id 600"),
        ({"allowed_token_ids": (1, 1, 2), "bad_words": ("b", "c")}, "has 2 token ids, and"),
        ({"allowed_token_ids": (51,), "min_tokens": 1}, "has 1 token ids, and"),
    ],
)
def test_what_the_vocabulary_cannot_serve_is_refused(params: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as refused:
        compiled(**params)

    assert refused.value.param in params


@pytest.mark.parametrize(
    "wrong",
    [
        {"presence_penalty": 2.1},
        {"presence_penalty": float("nan")},
        {"frequency_penalty": -2.01},
        {"frequency_penalty": True},
        {"repetition_penalty": 0},
        {"repetition_penalty": float("inf")},
        {"logit_bias": {1: 100.5}},
        {"logit_bias": {1: float("nan")}},
        {"logit_bias": {-1: 1}},
        {"logit_bias": {"1": 1}},
        {"logit_bias": [1]},
        {"allowed_token_ids": ()},
        {"allowed_token_ids": (-1,)},
        {"allowed_token_ids": 3},
        {"bad_words": ("",)},
        {"bad_words": "word"},
        {"bad_words": ("x",) * 129},
        {"min_tokens": -1},
        {"min_tokens": 17},
        {"min_tokens": 1.0},
        {"logprobs": 21},
        {"logprobs": -1},
        {"logprobs": True},
        {"prompt_logprobs": 21},
    ],
)
def test_parameters_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    """The message names the field, its value, and what it may be."""
    (name,) = wrong
    with pytest.raises(InvalidRequest, match=f"^{name} is .*; it must be ") as refused:
        SamplingParams(**wrong)

    assert refused.value.param == name


def test_parameters_are_kept_as_they_were_checked() -> None:
    """A dict that the caller changes later changes nothing; and they can be hashed."""
    bias = {1: 5.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = 1e9

    assert params.logit_bias == {1: 5.0}
    assert hash(params) == hash(SamplingParams(logit_bias={1: 5.0}))
