"""A bounded memory of blocks that could be found once: digests, and why they no longer can.

Read only to explain a miss; nothing that is reused depends on it.
"""

from collections.abc import Sequence
from itertools import repeat
from typing import Final

from prefixkv.cache_control import MissReason

FILED_AT: Final = 4096


class Forgotten:
    """The digests forgotten last; at least half of `capacity`, at most `capacity` and a few.

    Two generations of a dict: adding costs no more than an insertion, and the older generation is
    dropped as a whole.

    Attributes:
        evicted: digests of evicted blocks that are not filed yet; filing many at once is cheap.
    """

    def __init__(self, capacity: int = 65_536) -> None:
        self.capacity = capacity
        self.evicted: list[bytes] = []
        self._recent: dict[bytes, MissReason] = {}
        self._older: dict[bytes, MissReason] = {}

    def __len__(self) -> int:
        return len(self._recent) + len(self._older) + len(self.evicted)

    def file_evicted(self) -> None:
        """File what eviction has left, if it is much."""
        if len(self.evicted) >= FILED_AT:
            self._file_all()

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
        self._file(evicted, "evicted")

    def _file(self, digests: Sequence[bytes], reason: MissReason) -> None:
        half = self.capacity // 2
        self._recent.update(zip(digests[-half:], repeat(reason), strict=False))
        if len(self._recent) >= half:
            self._older, self._recent = self._recent, {}
