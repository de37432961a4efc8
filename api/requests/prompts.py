"""The four shapes of a completion's prompt, as one: a list of token id lists."""

from collections.abc import Sequence
from typing import Any

from prefixkv.api.engine_interface import Tokenizer
from prefixkv.errors import InvalidRequest

MAX_PROMPTS = 2048


def token_prompts(
    prompt: Any, tokenizer: Tokenizer, *, vocab_size: int, add_special_tokens: bool
) -> list[list[int]]:
    """Return one id list per prompt; takes time proportional to the text.

    `prompt` is a str, [str], [int] or [[int]].

    Raises:
        InvalidRequest: another shape, nothing to continue, or an id outside the vocabulary.
    """
    prompts = as_list(prompt)
    if len(prompts) > MAX_PROMPTS:
        raise InvalidRequest(
            f"prompt has {len(prompts)} prompts; one request may have {MAX_PROMPTS}.", "prompt"
        )
    if not prompts or not all(prompts):
        raise InvalidRequest("prompt is empty; there is nothing to continue.", "prompt")
    if all(isinstance(one, str) for one in prompts):
        return [_encoded(tokenizer, text, add_special_tokens) for text in prompts]
    if all(isinstance(one, list) for one in prompts):
        for ids in prompts:
            require_token_ids(ids, "prompt", vocab_size)
        return prompts
    raise _wrong_shape()


def require_token_ids(ids: Sequence[Any], param: str, vocab_size: int) -> None:
    """Raise InvalidRequest unless every one of `ids` is an integer in [0, vocab_size)."""
    for token_id in ids:
        if type(token_id) is not int:
            raise (
                _wrong_shape()
                if param == "prompt"
                else InvalidRequest(f"{param} must hold integers.", param)
            )
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{param} has the token id {token_id:.6g}; ids are in [0, {vocab_size}).", param
            )


def as_list(prompt: Any) -> list[Any]:
    """Return the prompts of a request, one or several; raises InvalidRequest on other shapes."""
    if prompt is None:
        raise InvalidRequest("prompt is missing.", "prompt")
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise _wrong_shape()
    return [prompt] if prompt and type(prompt[0]) is int else prompt


def _encoded(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    ids = tokenizer.encode(text, add_special_tokens)
    if not ids:
        raise InvalidRequest("prompt has no tokens; there is nothing to continue.", "prompt")
    return ids


def _wrong_shape() -> InvalidRequest:
    return InvalidRequest(
        "prompt must be a string, an array of strings, an array of token ids, "
        "or an array of arrays of token ids.",
        "prompt",
    )
