"""Fields that would change the answer and are not served yet: refused, never ignored.

Each has the values that ask for nothing; null always is one of them.
"""

from collections.abc import Callable, Mapping
from reprlib import Repr
from types import MappingProxyType
from typing import Any

from prefixkv.api.errors import UnsupportedField

_Neutral = Callable[[Any], bool]

_REPR = Repr()
_REPR.maxstring = _REPR.maxother = 60

_CONFIDENTIAL = frozenset({"suffix", "documents", "prompt", "prompt_embeds"})
"""Fields whose values are what a prompt is made of, and in no error message."""


def _is_false(value: Any) -> bool:
    return value is False


def _is_true(value: Any) -> bool:
    return value is True


def _is_empty(value: Any) -> bool:
    return value in ([], {}, "")


def _never(value: Any) -> bool:
    return False


def _is_plain_text(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") == "text"


_SHARED: dict[str, _Neutral] = {
    "suffix": _is_empty,
    "response_format": _is_plain_text,
    "structured_outputs": _never,
    "guided_json": _never,
    "guided_regex": _never,
    "guided_choice": _never,
    "guided_grammar": _never,
    "regex": _never,
    "ebnf": _never,
    "json_schema": _never,
    "logits_processors": _is_empty,
    "truncate_prompt_tokens": _never,
    "prompt_embeds": _never,
    "skip_special_tokens": _is_true,
    "return_token_ids": _is_false,
    "return_tokens_as_token_ids": _is_false,
}

UNSUPPORTED_IN_COMPLETIONS: Mapping[str, _Neutral] = MappingProxyType(_SHARED)

UNSUPPORTED_IN_CHATS: Mapping[str, _Neutral] = MappingProxyType(
    _SHARED
    | {
        "echo": _is_false,
        "tools": _never,
        "tool_choice": lambda value: value == "none",
        "functions": _never,
        "function_call": lambda value: value == "none",
        "audio": _never,
        "modalities": lambda value: value == ["text"],
        "web_search_options": _never,
        "documents": _is_empty,
        "chat_template": _never,
        # the chat template writes the special tokens itself
        "add_special_tokens": _is_false,
    }
)


def refuse_unsupported(body: Mapping[str, Any], unsupported: Mapping[str, _Neutral]) -> None:
    """Raise UnsupportedField for the first field that asks for what is not served."""
    for name, is_neutral in unsupported.items():
        value = body.get(name)
        if value is not None and not is_neutral(value):
            told = name if name in _CONFIDENTIAL else f"{name} is {_REPR.repr(value)}"
            raise UnsupportedField(f"{told}; this server does not support that yet.", name)
