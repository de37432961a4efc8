"""GET /metrics: vLLM's names, numbers that move, and an answer whatever the engine does."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from prometheus_client import openmetrics
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families
from tiny_models import tiny_engine, tiny_model

from prefixkv.api import metrics
from prefixkv.api.app import create_app
from prefixkv.async_engine import AsyncEngine
from prefixkv.errors import EngineStopped, QueueFull
from prefixkv.outputs import OutputDelta
from prefixkv.sampling_params import SamplingParams
from tests.api.fake_engine import FakeEngine

OF_VLLM = {
    *("num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason"),
    *("kv_cache_usage_perc", "cache_config_info", "prefix_cache_queries", "prefix_cache_hits"),
    *("prompt_tokens", "prompt_tokens_by_source", "prompt_tokens_cached"),
    *("prompt_tokens_cached_by_source", "generation_tokens", "request_success"),
    *("num_preemptions", "admission_rejections", "time_to_first_token_seconds"),
    *("inter_token_latency_seconds", "request_time_per_output_token_seconds"),
    *("e2e_request_latency_seconds", "request_queue_time_seconds"),
    *("request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens"),
    *("request_generation_tokens", "iteration_tokens_total", "request_params_n"),
    "request_prefill_kv_computed_tokens",
}
OURS = {
    *("cow_copies", "forks", "live_branches", "held_branches", "shared_blocks", "block_refs"),
    *("blocks_used", "sharing_ratio", "evicted_blocks", "splice_hits", "splice_misses"),
    *("engine_up", "engine_stats_age_seconds"),
}
LABELS = {"model_name", "engine", "reason", "source", "finished_reason", "le"}
SECRET = "sesame"

Samples = dict[tuple[str, str], float]


class Scraped:
    """An application over an engine on this event loop, and all that was scraped of it."""

    def __init__(self, client: httpx.AsyncClient, engine: AsyncEngine) -> None:
        self.client, self.engine = client, engine
        self.seen: list[Samples] = []

    async def scrape(self) -> Samples:
        """Return all samples, by name and labels."""
        response = await self.client.get("/metrics")
        assert response.status_code == 200
        assert SECRET not in response.text
        families = text_string_to_metric_families(response.text)
        samples = {
            (sample.name.removeprefix("prefixkv:"), str(sample.labels)): sample.value
            for family in families
            for sample in family.samples
        }
        self.seen.append(samples)
        return samples

    async def value(self, name: str, label: str = "") -> float:
        """Scrape, and return the sum of a metric's samples that have a label."""
        samples = await self.scrape()
        return sum(v for (key, labels), v in samples.items() if key == name and label in labels)

    def stream(self, prompt: list[int], **params: Any) -> AsyncIterator[OutputDelta]:
        """Generate, by itself without an end."""
        asked = SamplingParams(**{"max_tokens": 40, "ignore_eos": True, **params})
        return self.engine.generate(prompt, asked, cache_salt=SECRET)

    async def chat(self, *contents: str) -> str:
        """Run a chat whose turns alternate, and return its answer."""
        roles = ("user", "assistant")
        turns = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
        body = {"messages": turns, "max_tokens": 4, "cache_salt": SECRET, "temperature": 0}
        response = await self.client.post("/v1/chat/completions", json=body)
        answer: str = response.json()["choices"][0]["message"]["content"]
        return answer


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@asynccontextmanager
async def scraped(model: Any, **options: Any) -> AsyncIterator[Scraped]:
    """An application with a started engine."""
    engine = AsyncEngine(tiny_engine(model, **options))
    transport = httpx.ASGITransport(create_app(engine, ["tiny"]))
    await engine.start()
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            yield Scraped(client, engine)
    finally:
        await engine.stop()


async def drain(stream: AsyncIterator[OutputDelta]) -> None:
    """Run a stream to its end."""
    async for _ in stream:
        pass


def test_every_metric_moves(model: Any) -> None:
    """Branches, pressure, refusals, ends of all kinds: nothing on the page is for show."""

    async def main() -> set[str]:
        options = {"num_blocks": 40, "max_num_waiting": 2, "max_num_seqs": 2}
        async with scraped(model, **options, max_prefill_chunk=8) as service:
            await service.scrape()
            await of_branches(service)
            await of_the_queue(service)
            await of_the_ends(service)
            await of_chats(service)
            await of_pressure(service)
            await service.engine.stop()
            await service.scrape()
        seen = service.seen
        keys = set[tuple[str, str]]().union(*seen)
        moved = {key[0] for key in keys if len({samples.get(key, 0.0) for samples in seen}) > 1}
        return {name for name, _ in keys} - moved

    assert asyncio.run(main()) == {"cache_config_info"}


async def of_branches(service: Scraped) -> None:
    """Two outputs that share their prompt, and a branch that is held."""
    stream = service.stream([*range(5, 15)], n=2)
    await anext(stream)
    running = await service.value("num_requests_running")
    refs, used = service.seen[-1], await service.value("blocks_used")
    assert running == sum(v for (name, _), v in refs.items() if name == "live_branches") == 2
    assert await service.value("shared_blocks") >= 2
    assert await service.value("sharing_ratio") > 1
    assert await service.value("block_refs") > used > 0
    await drain(stream)
    assert await service.value("forks_total") == 1
    assert await service.value("cow_copies_total") >= 1
    engine = service.engine.engine
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    request = await service.engine.run(lambda: engine.add([7] * 5, params, keep=True))
    while await service.engine.run(lambda: engine.has_work):
        pass
    assert await service.value("held_branches") == 1
    await service.engine.run(request.held[0].release)


async def of_the_queue(service: Scraped) -> None:
    """One that runs, one that waits for its prompt to be computed, one more, and one too many."""
    gate = threading.Semaphore(0)
    forward = service.engine.engine.model.forward

    def gated(*arguments: Any) -> Any:
        assert gate.acquire(timeout=10)
        return forward(*arguments)

    service.engine.engine.model.forward = gated  # type: ignore[method-assign]
    prompts = [[50] * 30, [50] * 30]
    tasks = [asyncio.create_task(drain(service.stream(prompt))) for prompt in prompts]
    await asyncio.sleep(0.01)
    scraping = asyncio.create_task(service.scrape())
    await asyncio.sleep(0.01)
    gate.release()
    await scraping
    assert any(
        value and name == "num_requests_waiting_by_reason" and "deferred" in labels
        for (name, labels), value in service.seen[-1].items()
    )
    gate.release(10_000)
    tasks += [asyncio.create_task(drain(service.stream([60 + i] * 3))) for i in range(6)]
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert QueueFull in {type(end) for end in ends}
    del service.engine.engine.model.forward


async def of_the_ends(service: Scraped) -> None:
    """A stop token, a client that leaves, a step that fails; a refusal by HTTP."""
    before = await service.value("request_success_total")
    await drain(service.stream([5, 6], stop_token_ids=tuple(range(259)), ignore_eos=False))
    stream = service.stream([5, 6])
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    for reason in ("stop", "abort"):
        assert await service.value("request_success_total", f"'{reason}'") == 1
    assert await service.value("request_success_total") == before + 2
