"""Names of conversations: the same however a client spells them."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

Digest = bytes
"""Of a conversation's beginning, under one salt and one set of template options."""


def chat_digests(
    salt: str | None, template_kwargs: Mapping[str, Any], messages: Iterable[Mapping[str, Any]]
) -> list[Digest]:
    """Return the digest before the first message, and that after each; one pass over the text.

    What tells conversations apart for certain is their rendered text; this leaves out what most
    templates never read, such as ids of tool calls.
    """
    digests = [_digest(b"", [salt, template_kwargs])]
    for message in messages:
        digests.append(digest_with(digests[-1], message))
    return digests


def digest_with(digest: Digest, message: Mapping[str, Any]) -> Digest:
    """Return the digest of a conversation that goes on with `message`, a normalised one."""
    return _digest(digest, [message.get("role"), _text(message.get("content")), _calls(message)])


def _digest(parent: Digest, value: Any) -> Digest:
    # sorted keys: their order is the client's whim
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.blake2b(parent + text.encode(), digest_size=32).digest()


def _text(content: Any) -> Any:
    """Return the text of a content, string or parts; of another shape, the content itself."""
    if content is None:
        return ""
    if not isinstance(content, list):
        return content
    return "".join(
        part["text"]
        for part in content
        if isinstance(part, dict) and isinstance(part.get("text"), str)
    )


def _calls(message: Mapping[str, Any]) -> list[Any]:
    calls = message.get("tool_calls") or []
    return [[call["function"].get("name"), call["function"].get("arguments")] for call in calls]
