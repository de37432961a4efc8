"""Between the event loop, where deltas arrive, and the task that waits for those of one stream."""

import asyncio
from collections import deque

from prefixkv.outputs import OutputDelta


class Inbox:
    """What one stream is told; one task waits for it, on the loop that puts it in.

    An `asyncio.Queue` does more than that, and costs more for each token.
    """

    __slots__ = ("_items", "_waiter")

    def __init__(self) -> None:
        self._items: deque[OutputDelta | Exception] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: OutputDelta | Exception) -> None:
        """Add an item, and wake who waits."""
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> OutputDelta | Exception:
        """Take the oldest item; wait until there is one."""
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._items.popleft()
