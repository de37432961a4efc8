"""A bounded memory of things that share parts with each other."""

import sys
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Generic, Protocol, TypeVar


class Part(Protocol):
    """A piece of memory, told from others by its identity."""

    @property
    def num_bytes(self) -> int:
        """What it takes, about."""
        ...


class Shared(Protocol):
    """A thing that is made of parts."""

    def parts(self) -> Iterable[Part]:
        """Return its parts, each once."""
        ...


KeyT = TypeVar("KeyT", bound=Hashable)
SharedT = TypeVar("SharedT", bound=Shared)


class SharedLRU(Generic[KeyT, SharedT]):
    """Keeps what was used last, within bounds; a part that several things of an owner have counts
    once.

    Where there is no room, the owner who has the most lets go first: nobody displaces what others
    have by keeping much. May be used from several threads at once. Putting and dropping a thing
    takes time proportional to the number of its parts, and of the owners.

    Args:
        max_bytes: of all parts; 0 keeps nothing.
        max_entries: of things.
    """

    def __init__(self, max_bytes: int, max_entries: int = sys.maxsize) -> None:
        self.max_bytes = max_bytes
        self._max_entries = max_entries
        self._shares: dict[str, _Share[KeyT, SharedT]] = {}
        self._owners: dict[KeyT, str] = {}
        self._lock = threading.Lock()
        self.num_evicted = 0

    def __len__(self) -> int:
        return len(self._owners)

    @property
    def num_bytes(self) -> int:
        """What all that is kept takes, about."""
        return sum(share.num_bytes for share in tuple(self._shares.values()))

    def get(self, key: KeyT) -> SharedT | None:
        """Return what is kept under `key`, which becomes the last used, or None."""
        with self._lock:
            owner = self._owners.get(key)
            return self._shares[owner].use(key) if owner is not None else None

    def put(self, key: KeyT, value: SharedT, owner: str = "") -> None:
        """Keep `value` instead of what was there, and let go of what was not used for longest.

        What is too big to be kept alone displaces nothing else.
        """
        fits = sum(part.num_bytes for part in value.parts()) <= self.max_bytes
        with self._lock:
            self._drop(key)
            if not fits:
                self.num_evicted += 1
                return
            self._shares.setdefault(owner, _Share()).put(key, value)
            self._owners[key] = owner
            while self.num_bytes > self.max_bytes:
                self._evict(max(self._shares.values(), key=lambda share: share.num_bytes))
            while len(self._owners) > self._max_entries:
                self._evict(max(self._shares.values(), key=lambda share: len(share.entries)))

    def pop(self, key: KeyT) -> SharedT | None:
        """Let go of what is kept under `key` and return it, or None."""
        with self._lock:
            return self._drop(key)

    def _evict(self, share: "_Share[KeyT, SharedT]") -> None:
        self._drop(next(iter(share.entries)))
        self.num_evicted += 1

    def _drop(self, key: KeyT) -> SharedT | None:
        owner = self._owners.pop(key, None)
        if owner is None:
            return None
        share = self._shares[owner]
        value = share.drop(key)
        if not share.entries:
            del self._shares[owner]
        return value


class _Share(Generic[KeyT, SharedT]):
    """What one owner has, the least recently used first."""

    def __init__(self) -> None:
        self.entries: OrderedDict[KeyT, SharedT] = OrderedDict()
        self.num_bytes = 0
        self._num_holders: dict[Part, int] = {}

    def use(self, key: KeyT) -> SharedT:
        """Return what is kept under `key`, which becomes the last used."""
        self.entries.move_to_end(key)
        return self.entries[key]

    def put(self, key: KeyT, value: SharedT) -> None:
        """Keep `value` as the last used; nothing may be kept under `key`."""
        self.entries[key] = value
        for part in value.parts():
            num_holders = self._num_holders.get(part, 0)
            self._num_holders[part] = num_holders + 1
            self.num_bytes += part.num_bytes * (num_holders == 0)

    def drop(self, key: KeyT) -> SharedT:
        """Let go of what is kept under `key`."""
        value = self.entries.pop(key)
        for part in value.parts():
            self._num_holders[part] -= 1
            if not self._num_holders[part]:
                del self._num_holders[part]
                self.num_bytes -= part.num_bytes
        return value
