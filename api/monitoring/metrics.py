"""GET /metrics: what the engine and the edge count, for Prometheus.

Everything is counted where it happens and only read here. The engine's part is read on its own
thread, between two steps. Should that take too long, or the engine be dead, the numbers are those
of the last time, and `engine_stats_age_seconds` says how old they are: a scrape never hangs.
"""

import asyncio
import time
from collections.abc import Iterator
from typing import get_args

from fastapi import APIRouter
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector
from starlette.responses import Response

from prefixkv.api.history.token_memory import SpliceMiss
from prefixkv.api.monitoring.metric_families import Families
from prefixkv.api.monitoring.refusals import Refusals
from prefixkv.api.service import Service
from prefixkv.engine_stats import ServingStats
from prefixkv.errors import EngineStopped

WAIT_S = 1.0


class Metrics(Collector):
    """Collects from one service; the newest numbers of its engine are kept."""

    def __init__(self, service: Service, refusals: Refusals) -> None:
        self._service = service
        self._refusals = refusals
        self._families = Families(service.served_model_names[0])
        self._stats: ServingStats | None = None
        self._read_at = time.monotonic()
        self._reading: asyncio.Task[None] | None = None
        self.registry = CollectorRegistry()
        self.registry.register(self)

    async def refresh(self) -> None:
        """Read the engine's numbers anew, for `WAIT_S` at most; who scrapes meanwhile joins in."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read())
        await asyncio.wait({self._reading}, timeout=WAIT_S)

    async def _read(self) -> None:
        try:
            self._stats = await self._service.engine.snapshot()
        except EngineStopped:
            return
        self._read_at = time.monotonic()

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        families, memory = self._families, self._service.token_memory.stats
        is_up = self._service.engine.is_running
        yield families.gauge("engine_up", "Whether the engine takes requests.", is_up)
        age = time.monotonic() - self._read_at
        yield families.gauge("engine_stats_age_seconds", "Age of the engine's numbers.", age)
        meaning = "Requests turned away because others come first, by why."
        refused = {"queue_full": 0} | self._refusals.counts
        yield families.counter("admission_rejections", meaning, refused, "reason")
        meaning = "Chats whose history has answers whose tokens were put in."
        yield families.counter("splice_hits", meaning, memory.num_hits)
        meaning = "Chats whose history has answers that had to be tokenised, by why."
        missed = {reason: memory.num_misses[reason] for reason in get_args(SpliceMiss)}
        yield families.counter("splice_misses", meaning, missed, "reason")
        if self._stats is not None:
            yield from families.of_engine(self._stats)


def metrics_router(service: Service, refusals: Refusals) -> APIRouter:
    """Return the route that Prometheus asks."""
    router = APIRouter()
    metrics = Metrics(service, refusals)

    @router.get("/metrics", response_model=None)
    @router.head("/metrics", response_model=None, include_in_schema=False)
    async def tell_metrics() -> Response:
        """Tell all metrics, as text: OpenMetrics would have another character for the colon."""
        await metrics.refresh()
        content = generate_latest(metrics.registry)
        return Response(content, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    return router
