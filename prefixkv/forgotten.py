"""A bounded memory of blocks that could be found once: digests, and why they no longer can.

Read only to explain a miss; nothing that is reused depends on it. A digest stands for all blocks
before it, so of the blocks that an eviction takes one in 32 is remembered, and the first one of
each chain: who resends a long prompt meets one of them. To keep them all would make eviction a
quarter slower: a digest that is kept is memory that the next one cannot take, still warm.
"""

from collections.abc import Sequence
from itertools import repeat
from typing import Final

from prefixkv.block import Block
from prefixkv.cache_control import MissReason

STRIDE: Final = 32
FILED_AT: Final = 4096


class Forgotten:
    """The digests forgotten last; at least half of `capacity`, at most `capacity` and a few.

    Two generations of a dict: adding costs no more than an insertion, and the older generation is
    dropped as a whole.

    Attributes:
        evicted: digests of evicted blocks that are not filed yet, None for tails; filing many at
            once is cheap.
    """

    def __init__(self, capacity: int = 65_536) -> None:
        self.capacity = capacity
        self.evicted: list[bytes | None] = []
        self._recent: dict[bytes, MissReason] = {}
        self._older: dict[bytes, MissReason] = {}

    def __len__(self) -> int:
        return len(self._recent) + len(self._older) + len(self.evicted)

    def note_evicted(self, victims: list[Block]) -> None:
        """Remember one in 32 of the blocks that are about to be evicted, and the last one.

        They stand chain by chain, each from its end, where a tail may be, which has no digest. Who
        evicts adds the first of each chain.
        """
        if len(self.evicted) >= FILED_AT:
            self._file_all()
        self.evicted += [block.digest for block in victims[1::STRIDE]]
        self.evicted.append(victims[-1].digest)

    def add(self, digests: Sequence[bytes], reason: MissReason) -> None:
        """Remember why these cannot be found any more, the last ones if they are too many."""
        self._file_all()
        self._file(digests, reason)

    def reason(self, digest: bytes) -> MissReason | None:
        """Why what was found under a digest was forgotten last; None if nothing is known."""
        if self.evicted:
            self._file_all()
        return self._recent.get(digest) or self._older.get(digest)

    def _file_all(self) -> None:
        evicted, self.evicted = self.evicted, []
        self._file([digest for digest in evicted if digest], "evicted")

    def _file(self, digests: Sequence[bytes], reason: MissReason) -> None:
        half = self.capacity // 2
        digests = digests[-half:]
        if len(self._recent) + len(digests) > half:
            self._older, self._recent = self._recent, {}
        self._recent.update(zip(digests, repeat(reason), strict=False))
