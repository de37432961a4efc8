"""What was generated for chats, kept as ids: the next turn gets those, not new ones for its text.

A tokenizer cuts a text in one way; a model that wrote it may have cut it in another. Encoded anew,
an answer in the history would not be what stands in the cache. So the ids of each answer are kept,
with those of its prompt, and put in where a later chat has the same beginning. The rendered text
decides: where the template makes something else of the history, its text is encoded as ever.
"""

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from prefixkv.api.engine_interface import Tokenizer
from prefixkv.api.history.chat_digest import Digest, chat_digests, digest_with
from prefixkv.api.history.shared_lru import SharedLRU
from prefixkv.api.history.told_tokens import ToldTokens
from prefixkv.api.history.transcript import Transcript, transcript_of
from prefixkv.api.options.server_options import TOKEN_MEMORY_BYTES
from prefixkv.api.requests.messages import RenderedChat

SpliceMiss = Literal["unknown", "rewritten", "seam"]
"""Why no ids were put in: none is remembered for the chat's beginning (any more); its text is now
another one; or what follows would not be encoded to itself when encoded alone."""


@dataclass(slots=True)
class TokenMemoryStats:
    """Counts of chats that have an answer in their history; the others had nothing to gain."""

    num_hits: int = 0
    num_spliced_tokens: int = 0
    num_misses: Counter[SpliceMiss] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class ChatTokens:
    """The tokens of a chat's prompt, and what is needed to remember an answer to it."""

    token_ids: list[int]
    transcript: Transcript
    digest: Digest | None


class TokenMemory:
    """Remembers answers, those used last, within a number of bytes; usable from several threads.

    Attributes:
        stats: counts since the start.
    """

    def __init__(self, max_bytes: int = TOKEN_MEMORY_BYTES) -> None:
        self._answers: SharedLRU[Digest, Transcript] = SharedLRU(max_bytes)
        self.stats = TokenMemoryStats()
        self._stats_lock = threading.Lock()

    @property
    def num_entries(self) -> int:
        """Answers that are remembered."""
        return len(self._answers)

    @property
    def num_bytes(self) -> int:
        """What they take."""
        return self._answers.num_bytes

    @property
    def num_evicted(self) -> int:
        """Answers that were forgotten because there was no room."""
        return self._answers.num_evicted

    def tokens(self, chat: RenderedChat, salt: str | None, tokenizer: Tokenizer) -> ChatTokens:
        """Return the tokens of a chat, those of remembered answers included.

        `salt` is the engine's: what was generated under another one is unknown here. Encodes only
        what is behind the longest remembered beginning.
        """
        digests = self.digests(chat, salt)
        found = self._longest(chat, digests)
        digest = digests[-1] if digests else None
        if found is not None:
            spliced = tokens_behind(found, chat.text[found.end :], digest, tokenizer)
            self._count(None if spliced else "seam", found)
            if spliced is not None:
                return spliced
        ids = tokenizer.encode(chat.text, add_special_tokens=False)
        return ChatTokens(ids, transcript_of(chat.text, ids), digest)

    def remember(
        self, chat: ChatTokens, answer: str, told: ToldTokens, owner: str = ""
    ) -> Transcript:
        """Remember an answer to `chat`; returns the transcript that ends with it.

        Args:
            answer: what a client will repeat as the assistant's message.
            owner: the tenant whose share of the memory it takes.
        """
        transcript = chat.transcript.followed_by(told.text, told.token_ids)
        if chat.digest is not None:
            message = {"role": "assistant", "content": answer}
            self._answers.put(digest_with(chat.digest, message), transcript, owner)
        return transcript

    def digests(self, chat: RenderedChat, salt: str | None) -> list[Digest]:
        """Return the digests of a chat's beginnings, none if nothing is ever remembered."""
        if not self._answers.max_bytes or chat.is_open:
            return []
        try:
            return chat_digests(salt, chat.template_kwargs, chat.messages)
        except RecursionError:  # tool arguments may be nested as deeply as the body's parser allows
            return []

    def _longest(self, chat: RenderedChat, digests: Sequence[Digest]) -> Transcript | None:
        """Return the longest remembered beginning that the rendered text still begins with."""
        ends = [
            end
            for end, message in enumerate(chat.messages[: len(digests)], start=1)
            if message["role"] == "assistant"
        ]
        reason: SpliceMiss = "unknown"
        for end in reversed(ends):
            found = self._answers.get(digests[end])
            if found is None:
                continue
            if found.begins(chat.text):
                return found
            reason = "rewritten"
        if ends:
            self._count(reason)
        return None

    def _count(self, miss: SpliceMiss | None, found: Transcript | None = None) -> None:
        with self._stats_lock:
            if miss is not None:
                self.stats.num_misses[miss] += 1
            elif found is not None:
                self.stats.num_hits += 1
                self.stats.num_spliced_tokens += found.num_tokens


def tokens_behind(
    beginning: Transcript, text: str, digest: Digest | None, tokenizer: Tokenizer
) -> ChatTokens | None:
    """Return a prompt that goes on behind `beginning` with `text`; takes time for that text only.

    None where the text, encoded alone, comes out as another one: some tokenizers put a space
    before a text that stands alone, or drop one.
    """
    ids = tokenizer.encode(text, add_special_tokens=False) if text else []
    if b"".join(map(tokenizer.token_bytes, ids)) != text.encode():
        return None
    token_ids = beginning.all_token_ids()
    token_ids.extend(ids)
    return ChatTokens(token_ids, beginning.followed_by(text, ids), digest)
