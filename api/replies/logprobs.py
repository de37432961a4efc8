"""Log-probabilities in the two shapes of OpenAI: of completions and of chats."""

import codecs
import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from prefixkv.api.engine_interface import Tokenizer
from prefixkv.outputs import PromptLogprob, TokenLogprobs

LEAST = -9999.0
"""What OpenAI's types document for a token that is very unlikely."""

MANY_LOGPROBS = 256
"""Encoding those of more tokens takes longer than a hop to a thread and back."""


class LogprobsBody(Protocol):
    """Encodes the log-probabilities of one choice, all at once or one chunk after the other."""

    def __call__(self, entries: Iterable[TokenLogprobs]) -> dict[str, Any]:
        """Return the object for the next tokens of the choice."""
        ...


class CompletionLogprobs:
    """The four parallel lists of completions; remembers how long the text is so far.

    `top_logprobs` holds the likeliest tokens and the chosen one. A token that is no whole
    character reads `bytes:\\xe2\\x80`, as at OpenAI: as U+FFFD many tokens would share one key.

    Args:
        echo: the prompt, if it is told before the completion. It may spell special tokens, and it
            may lack the space that some tokenizers begin with.
    """

    def __init__(self, tokenizer: Tokenizer, echo: str = "") -> None:
        self._tokenizer = tokenizer
        self._echo = echo
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def __call__(self, entries: Iterable[TokenLogprobs]) -> dict[str, Any]:
        """Return the lists for the next tokens."""
        tokens: list[str] = []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for entry in entries:
            is_known = not math.isnan(entry.logprob)  # as it is not of a prompt's first token
            tokens.append(self._name(entry.token_id))
            logprobs.append(max(entry.logprob, LEAST) if is_known else None)
            tops.append(self._top(entry) if is_known else None)
            offsets.append(self._offset)
            self._advance(entry.token_id)
        return {
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        top: dict[str, float] = {}
        for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            # where two tokens have one text, the likelier counts
            top.setdefault(self._name(token_id), max(logprob, LEAST))
        return top

    def _name(self, token_id: int) -> str:
        data = self._tokenizer.token_bytes(token_id)
        return _whole_text(data) or f"bytes:{_escaped(data)}" if data else ""

    def _advance(self, token_id: int) -> None:
        data = self._tokenizer.token_bytes(token_id)
        if token_id in self._tokenizer.special_token_ids:
            name = data.decode("utf-8", "replace")
            self._offset += len(name) * self._echo.startswith(name, self._offset)
            return
        text = self._decoder.decode(data)
        is_added = self._offset == 0 and self._echo and text[:1] == " " != self._echo[0]
        self._offset += len(text) - bool(is_added)


def prompt_logprobs_body(
    values: Sequence[PromptLogprob], num_top: int, tokenizer: Tokenizer
) -> list[dict[str, Any] | None]:
    """Return vLLM's `prompt_logprobs`: by token id, of the token itself and of the likeliest."""
    return [_by_token(value, num_top, tokenizer) for value in values]


def _by_token(value: PromptLogprob, num_top: int, tokenizer: Tokenizer) -> dict[str, Any] | None:
    if value is None:
        return None
    ranked = [(value.token_id, value.logprob, value.rank)]
    ranked += [(*pair, rank) for rank, pair in enumerate(value.top[:num_top], start=1)]
    return {
        str(token_id): {
            "logprob": max(logprob, LEAST),
            "rank": rank,
            "decoded_token": tokenizer.token_bytes(token_id).decode("utf-8", "replace"),
        }
        for token_id, logprob, rank in reversed(ranked)  # of a token that is both, its own rank
    }


class ChatLogprobs:
    """The list of chats. The bytes of all tokens, joined, are the text; special ones have none."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, entries: Iterable[TokenLogprobs]) -> dict[str, Any]:
        """Return the object for the next tokens."""
        content = [
            {
                **self._token(entry.token_id, entry.logprob),
                "top_logprobs": [self._token(*pair) for pair in entry.top],
            }
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token_id)
        is_special = token_id in self._tokenizer.special_token_ids
        return {
            "token": _whole_text(data) or _escaped(data),
            "logprob": max(logprob, LEAST),
            "bytes": None if is_special else list(data),
        }


def _whole_text(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _escaped(data: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in data)
