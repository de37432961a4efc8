"""An async engine that other threads can ask how it is."""

import asyncio
from typing import Any

from prefixkv.async_engine import AsyncEngine

ASK_SECONDS = 20


class AskedEngine(AsyncEngine):
    """Remembers its event loop, so that a test can ask from another thread."""

    async def start(self) -> None:
        """Start on the loop of now."""
        self.loop = asyncio.get_running_loop()
        await super().start()

    def ask(self) -> dict[str, Any]:
        """The engine's stats; checks its books on the way."""

        def look() -> dict[str, Any]:
            self.engine.check_invariants()
            return self.engine.stats()

        return asyncio.run_coroutine_threadsafe(self.run(look), self.loop).result(ASK_SECONDS)

    def is_idle(self) -> bool:
        """Whether nothing runs, waits or is held."""
        stats = self.ask()
        names = ("kv_cache_usage", "num_requests_running", "num_requests_waiting")
        return [stats[name] for name in names] == [0, 0, 0]
