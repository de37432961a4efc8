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
    """Keeps what was used last, within bounds; a part that several things have counts once.

    May be used from several threads at once. Putting and dropping a thing takes time proportional
    to the number of its parts.

    Args:
        max_bytes: of all parts; 0 keeps nothing.
        max_entries: of things.
    """

    def __init__(self, max_bytes: int, max_entries: int = sys.maxsize) -> None:
        self.max_bytes = max_bytes
        self._max_entries = max_entries
        self._entries: OrderedDict[KeyT, SharedT] = OrderedDict()
        self._num_holders: dict[Part, int] = {}
        self._lock = threading.Lock()
        self.num_bytes = 0
        self.num_evicted = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: KeyT) -> SharedT | None:
        """Return what is kept under `key`, which becomes the last used, or None."""
        with self._lock:
            value = self._entries.get(key)
            if value is not None:
                self._entries.move_to_end(key)
            return value

    def put(self, key: KeyT, value: SharedT) -> None:
        """Keep `value` instead of what was there, and let go of what was not used for longest.

        What is too big to be kept alone displaces nothing else.
        """
        fits = sum(part.num_bytes for part in value.parts()) <= self.max_bytes
        with self._lock:
            replaced = self._entries.pop(key, None)
            if replaced is not None:
                self._release(replaced)
            if not fits:
                self.num_evicted += 1
                return
            self._hold(value)
            self._entries[key] = value
            while self.num_bytes > self.max_bytes or len(self._entries) > self._max_entries:
                _, evicted = self._entries.popitem(last=False)
                self._release(evicted)
                self.num_evicted += 1

    def pop(self, key: KeyT) -> SharedT | None:
        """Let go of what is kept under `key` and return it, or None."""
        with self._lock:
            value = self._entries.pop(key, None)
            if value is not None:
                self._release(value)
            return value

    def _hold(self, value: SharedT) -> None:
        for part in value.parts():
            num_holders = self._num_holders.get(part, 0)
            self._num_holders[part] = num_holders + 1
            self.num_bytes += part.num_bytes * (num_holders == 0)

    def _release(self, value: SharedT) -> None:
        for part in value.parts():
            self._num_holders[part] -= 1
            if not self._num_holders[part]:
                del self._num_holders[part]
                self.num_bytes -= part.num_bytes
