"""`prefixkv serve` over a tiny model, with one more route: GET /books tells what the server holds.

The route checks the invariants of the engine first; it answers 500 if they do not hold.
"""

import asyncio
import ctypes
import gc
from typing import Any

import psutil
from fastapi import FastAPI
from tiny_models import tiny_engine

from prefixkv.api import cli
from prefixkv.api.serving import server
from prefixkv.async_engine import AsyncEngine
from prefixkv.config import EngineConfig

NUM_BLOCKS = 600  # fewer than its requests need at once, so that some are preempted


def build_engine(config: EngineConfig) -> AsyncEngine:
    """Return an engine over a tiny model, whatever model was asked for."""
    return AsyncEngine(tiny_engine(num_blocks=NUM_BLOCKS, max_num_waiting=512))


def resident_bytes() -> int:
    """Memory of this process, after garbage and what the allocator keeps free are given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


def with_books(app: FastAPI, engine: AsyncEngine) -> FastAPI:
    """Add the route to `app`."""

    def look() -> dict[str, Any]:
        engine.engine.check_invariants()
        return engine.engine.stats()

    @app.get("/books")
    async def books() -> dict[str, Any]:
        return {
            **await engine.run(look),
            "num_inboxes": len(engine._inboxes),
            "num_tasks": len(asyncio.all_tasks()),
            "num_files": psutil.Process().num_fds(),
            "resident_bytes": resident_bytes(),
        }

    return app


if __name__ == "__main__":
    patched: Any = server
    make_app = patched.create_app
    patched.build_engine = build_engine
    patched.create_app = lambda engine, *args, **kwargs: with_books(
        make_app(engine, *args, **kwargs), engine
    )
    cli.main()
