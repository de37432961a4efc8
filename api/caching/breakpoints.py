"""Breakpoints of a chat: from a mark on a part of a message to a number of prompt tokens.

A chat template may lay messages out in any way, so it is asked: a rendering with a sentinel behind
each marked part shows where the parts end, if without the sentinels it is the text of the prompt.
"""

import re
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from pydantic import ValidationError

from prefixkv.api.caching.cache_fields import CacheMark
from prefixkv.api.engine_interface import Tokenizer
from prefixkv.errors import InvalidRequest

MAX_MARKS = 80
"""Of one request that are looked at, the last ones, as OpenAI does."""

_NAMES = ("prompt_cache_breakpoint", "cache_control")

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Mark:
    """A breakpoint behind a part of a message, or behind its whole content where `part` is None.

    `ttl_s` is the lifetime that it names itself.
    """

    message: int
    part: int | None
    ttl_s: float | None


def take_marks(messages: Any, param: str = "messages") -> list[Mark]:
    """Take the breakpoints out of messages as a client sent them, which are changed in place.

    What is left renders, and is remembered, as if it had never been marked. What is no message is
    left to those who judge messages.

    Args:
        param: the field that the client sent them in.

    Raises:
        InvalidRequest: a breakpoint is not an object, or a field of it is wrong.
    """
    marks: list[Mark] = []
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        if not isinstance(message, dict):
            continue
        content = message.get("content")
        for j, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, dict):
                marks += _taken(part, i, j, param)
        marks += _taken(message, i, None, param)
    return marks[-MAX_MARKS:]


def _taken(owner: dict[str, Any], message: int, part: int | None, param: str) -> list[Mark]:
    values = {name: owner.pop(name, None) for name in _NAMES}
    where = f"{param}.{message}" + ("" if part is None else f".content.{part}")
    marks = [
        Mark(message, part, _parsed(value, f"{where}.{name}").ttl)
        for name, value in values.items()
        if value is not None
    ]
    return marks[:1]  # under both names it is one breakpoint


def _parsed(value: Any, param: str) -> CacheMark:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{param} must be an object.", param)
    try:
        return CacheMark.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        param = f"{param}.{first['loc'][0]}"
        raise InvalidRequest(f"{param}: {first['msg']}.", param) from None


def breakpoint_positions(
    marks: Sequence[Mark],
    messages: Sequence[Message],
    render: Callable[[Sequence[Message]], str],
    prompt: Sequence[int],
    tokenizer: Tokenizer,
) -> list[int | None]:
    """Return for each mark how many tokens of `prompt` lie before it.

    None for a mark whose place the rendered chat does not show. A token that lies on both sides of
    a mark counts as behind it. Takes time proportional to the text.

    Args:
        render: makes a text of messages; the one that `prompt` was made by.
        prompt: need not be what the tokenizer makes of the text: parts of it may be spelled by
            other tokens, or even in other ways.
    """
    if not marks:
        return []
    text = render(messages)
    offsets = _offsets(marks, messages, render, text)
    spelled = _SpelledPrompt(prompt, tokenizer)
    return [None if end is None else spelled.num_tokens(text[:end], text[end:]) for end in offsets]


def _offsets(
    marks: Sequence[Mark],
    messages: Sequence[Message],
    render: Callable[[Sequence[Message]], str],
    text: str,
) -> list[int | None]:
    """Return where in `text` the marked parts end."""
    sentinels = _Sentinels()
    try:
        plain, found = sentinels.found(render(sentinels.put(marks, messages)))
    except InvalidRequest:  # a template may be particular about a content that it looks at
        return [None] * len(marks)
    offsets: list[int | None] = []
    for number, mark in enumerate(marks):
        ends = found.get(number, [])
        if len(ends) != 1 or not text.startswith(plain[: ends[0]]):
            offsets.append(None)
            continue
        space = _trailing_space(_part_text(messages[mark.message], mark.part))
        offsets.append(ends[0] + len(space) * text.startswith(space, ends[0]))
    return offsets


class _Sentinels:
    """Strings that no client can have sent, one for each mark."""

    def __init__(self) -> None:
        self._nonce = secrets.token_hex(16)

    def put(self, marks: Sequence[Mark], messages: Sequence[Message]) -> list[Message]:
        """Return copies of `messages` with the sentinel of each mark behind what it marks."""
        marked = list(messages)
        for number, mark in enumerate(marks):
            message = marked[mark.message]
            marked[mark.message] = _with_text(message, mark.part, self._behind, number)
        return marked

    def found(self, marked: str) -> tuple[str, dict[int, list[int]]]:
        """Return a text without its sentinels, and where in that each of them stood."""
        first, *rest = re.split(rf"{self._nonce}(\d\d)", marked)
        pieces, end = [first], len(first)
        places: dict[int, list[int]] = {}
        for number, piece in zip(rest[::2], rest[1::2], strict=True):
            places.setdefault(int(number), []).append(end)
            pieces.append(piece)
            end += len(piece)
        return "".join(pieces), places

    def _behind(self, text: str, number: int) -> str:
        # templates trim: behind white space it would keep what is cut off without it
        space = _trailing_space(text)
        return f"{text.removesuffix(space)}{self._nonce}{number:02}{space}"


def _with_text(
    message: Message, part: int | None, change: Callable[[str, int], str], number: int
) -> Message:
    content = message.get("content")
    text = change(_part_text(message, part), number)
    if not isinstance(content, list):
        return {**message, "content": text}
    if not content:
        return {**message, "content": [{"type": "text", "text": text}]}
    parts = list(content)
    place = len(parts) - 1 if part is None else part
    parts[place] = {**parts[place], "text": text}
    return {**message, "content": parts}


def _part_text(message: Message, part: int | None) -> str:
    content = message.get("content")
    if isinstance(content, list):
        content = content[-1 if part is None else part].get("text") if content else ""
    return content if isinstance(content, str) else ""


def _trailing_space(text: str) -> str:
    return text[len(text.rstrip()) :]


class _SpelledPrompt:
    """What the tokens of a prompt spell, and where each ends."""

    def __init__(self, prompt: Sequence[int], tokenizer: Tokenizer) -> None:
        pieces = [tokenizer.token_bytes(token_id) for token_id in prompt]
        self._spelled = b"".join(pieces)
        self._ends = list(accumulate(map(len, pieces)))

    def num_tokens(self, before: str, behind: str) -> int:
        """Return how many tokens lie in front of the place between two halves of the text.

        Where the tokens spell neither half, as many as spell what is before.
        """
        head, tail = before.encode(), behind.encode()
        if self._spelled.startswith(head):
            return bisect_right(self._ends, len(head))
        if self._spelled.endswith(tail):
            return bisect_right(self._ends, len(self._spelled) - len(tail))

        def strays(end: int) -> bool:
            return not head.startswith(self._spelled[:end])

        return bisect_left(self._ends, True, key=strays)
