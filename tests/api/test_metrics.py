"""GET /metrics: vLLM's names, numbers that move, and an answer whatever the engine does."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tiny_models import tiny_engine, tiny_model

from prefixkv.api.app import create_app
from prefixkv.api.monitoring import metrics
from prefixkv.api.monitoring.refusals import Refusals
from prefixkv.async_engine import AsyncEngine
from prefixkv.cache_control import Breakpoint, CacheControl
from prefixkv.errors import QueueFull
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
    *("engine_up", "engine_stats_age_seconds", "leases", "leased_blocks", "leases_granted"),
    *("leases_renewed", "leases_refused", "leases_expired", "leases_given_up", "miss_reason"),
}
LABELS = {"model_name", "engine", "reason", "source", "finished_reason", "le"}
LABELS_IN_TEXT = 'engine="0",model_name="tiny"'
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

    @contextmanager
    def gated(self) -> Iterator[threading.Semaphore]:
        """Let the model run once for each release, until the end."""
        model, gate = self.engine.engine.model, threading.Semaphore(0)
        forward = model.forward

        def gated(*arguments: Any) -> Any:
            assert gate.acquire(timeout=10)
            return forward(*arguments)

        model.forward = gated  # type: ignore[assignment,method-assign]
        yield gate
        model.forward = forward  # type: ignore[method-assign]
        gate.release()

    async def scrape_after(self, gate: threading.Semaphore) -> Samples:
        """Scrape between the step that waits at the gate, or comes to it, and the next one."""
        scraping = asyncio.create_task(self.scrape())
        while self.engine._commands.empty() and not scraping.done():
            await asyncio.sleep(0)
        gate.release()
        return await scraping

    def stream(self, prompt: list[int], **params: Any) -> AsyncIterator[OutputDelta]:
        """Generate, by itself without an end."""
        asked = SamplingParams(**{"max_tokens": 20, "ignore_eos": True, **params})
        return self.engine.generate(prompt, asked, cache_salt=SECRET)

    async def completion(self, prompt: list[int]) -> int:
        """Return the status of a completion."""
        body = {"prompt": prompt, "max_tokens": 2, "cache_salt": SECRET}
        response = await self.client.post("/v1/completions", json=body)
        return response.status_code

    async def lease(self, prompt: list[int], *, ttl_s: float) -> None:
        """Run a request that asks for a lease of its prompt."""
        control = CacheControl(breakpoints=(Breakpoint(len(prompt), ttl_s),))
        params = SamplingParams(max_tokens=1)
        await drain(self.engine.generate(prompt, params, cache_control=control))

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
        options = {"num_blocks": 21, "max_num_waiting": 2, "max_num_seqs": 2}
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
    with service.gated() as gate:
        stream = service.stream([*range(5, 15)], n=2)
        gate.release(2)  # a chunk of the prompt each
        await anext(stream)
        seen = {name: value for (name, _), value in (await service.scrape_after(gate)).items()}
        assert seen["num_requests_running"] == seen["live_branches"] == 2
        used, shared = seen["blocks_used"], seen["shared_blocks"]
        assert seen["block_refs"] == 6
        assert (used, shared) in {(3, 3), (4, 2)}  # before or after the copy of the third
        assert seen["sharing_ratio"] == 6 / used
    await drain(stream)
    assert await service.value("forks_total") == 1
    assert await service.value("cow_copies_total") > 0
    engine = service.engine.engine
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    request = await service.engine.run(lambda: engine.add([7] * 5, params, keep=True))
    while await service.engine.run(lambda: engine.has_work):
        pass
    assert await service.value("held_branches") == 1
    await service.engine.run(request.held[0].release)


async def of_the_queue(service: Scraped) -> None:
    """One that runs, one that waits for its prompt to be computed; then more than may wait."""
    with service.gated() as gate:
        tasks = [asyncio.create_task(drain(service.stream([50] * 30))) for _ in range(2)]
        for _ in range(2):  # the second may come after the first has begun
            await service.scrape_after(gate)
        seen = service.seen[-1].items()
        deferred = [v for (name, labels), v in seen if "waiting_by" in name and "deferr" in labels]
        assert deferred == [1]
        answering = [asyncio.create_task(service.completion([60 + i] * 3)) for i in range(8)]
        await service.scrape_after(gate)
    statuses = await asyncio.gather(*answering)
    await asyncio.gather(*tasks)
    num_refused = statuses.count(429)
    assert 0 < num_refused < 8
    assert await service.value("admission_rejections_total", "queue_full") == num_refused


async def of_the_ends(service: Scraped) -> None:
    """A stop token, a client that leaves, a step that fails."""
    before = await service.value("request_success_total")
    await drain(service.stream([5, 6], stop_token_ids=tuple(range(259))))
    async with aclosing(service.stream([5, 6])) as stream:  # type: ignore[type-var]
        await anext(stream)
    model = service.engine.engine.model
    forward = model.forward
    model.forward = None  # type: ignore[assignment,method-assign]
    assert await service.completion([5, 6, 7]) == 500
    model.forward = forward  # type: ignore[method-assign]
    for reason in ("stop", "abort", "error"):
        assert await service.value("request_success_total", f"'{reason}'") == 1
    assert await service.value("request_success_total") == before + 3


async def of_chats(service: Scraped) -> None:
    """A second turn with the answer to the first, and one with an answer of somebody else."""
    answer = await service.chat("Hi")
    assert await service.value("splice_hits_total") == 0
    await service.chat("Hi", answer, "Go on")
    await service.chat("Hi", "Hello, you!", "Go on")
    assert await service.value("splice_hits_total") == 1
    assert await service.value("splice_misses_total", "unknown") == 1


async def of_pressure(service: Scraped) -> None:
    """Two that need more than there is; leases of each fate."""
    prompts = [[80 + i] * 28 for i in range(2)]
    await asyncio.gather(*(drain(service.stream(prompt)) for prompt in prompts))
    assert await service.value("num_preemptions_total") > 0
    assert await service.value("evicted_blocks_total") > 0
    assert await service.value("miss_reason_total", "never_computed") > 0
    leases = service.engine.engine.scheduler.leases
    now = leases.clock()
    leases.clock = lambda: now
    await service.lease([70] * 9, ttl_s=5)
    await service.lease([70] * 9, ttl_s=9)
    assert await service.value("leased_blocks") == 3
    await service.lease([71] * 60, ttl_s=5)
    leases.clock = lambda: now + 60
    await service.lease([72] * 36, ttl_s=50)
    await drain(service.stream([73] * 56))
    for fate in ("granted", "renewed", "refused", "expired", "given_up"):
        assert await service.value(f"leases_{fate}_total") > 0, fate


def test_names_are_those_of_vllm_and_our_own(model: Any) -> None:
    """Labels hold nothing that a client chose."""

    async def main() -> None:
        async with scraped(model) as service:
            await drain(service.stream([5, 6]))
            response = await service.client.get("/metrics")
            families = list(text_string_to_metric_families(response.text))
            names = {family.name.removeprefix("prefixkv:") for family in families}
            assert names == OF_VLLM | OURS
            for family in families:
                for sample in family.samples:
                    assert sample.labels["model_name"] == "tiny"
                    assert sample.labels["engine"] == "0"
                    assert set(sample.labels) <= LABELS or family.name.endswith("_info")

    asyncio.run(main())


def test_a_scrape_never_waits_for_the_engine(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is answered with what was known, and one reading at a time waits; also of the dead."""

    async def main() -> None:
        async with scraped(model) as service:
            fresh = await service.value("engine_stats_age_seconds")
            monkeypatch.setattr(metrics, "WAIT_S", 0.05)
            leave = threading.Event()
            blocking = asyncio.create_task(service.engine.run(lambda: leave.wait(10)))
            await asyncio.sleep(0)
            ages = [await service.value("engine_stats_age_seconds") for _ in range(3)]
            assert fresh + 0.04 <= ages[0] <= ages[1] - 0.04 <= ages[2] - 0.08 < 5
            assert await service.value("kv_cache_usage_perc") == 0
            assert service.engine._commands.qsize() == 1
            leave.set()
            await blocking
            assert await service.value("engine_up") == 1
            await service.engine.stop()
            assert await service.value("engine_up") == 0
            assert "num_preemptions_total" in {name for name, _ in service.seen[-1]}

    asyncio.run(main())


def test_an_engine_that_never_ran_has_no_numbers() -> None:
    """The page says so, and what the edge knows."""

    async def main() -> None:
        transport = httpx.ASGITransport(create_app(FakeEngine(), ["tiny"]))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            text = (await client.get("/metrics")).text
        assert f"prefixkv:engine_up{{{LABELS_IN_TEXT}}} 0.0" in text
        assert "prefixkv:splice_hits_total" in text
        assert "prefixkv:num_requests_running" not in text

    asyncio.run(main())


def test_head_asks_whether_there_are_metrics(client: httpx.Client) -> None:
    """Some benchmarks do before they begin; Prometheus' own format is the default."""
    response = client.head("/metrics")
    assert (response.status_code, response.content) == (200, b"")
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert "prefixkv:num_requests_running{" in client.get("/metrics").text


def test_probes_of_health_are_no_rejections(client: httpx.Client, engine: FakeEngine) -> None:
    """Only what would have been served is counted, by why it was not."""

    def rejected() -> dict[str, float]:
        families = text_string_to_metric_families(client.get("/metrics").text)
        family = next(f for f in families if f.name == "prefixkv:admission_rejections")
        return {sample.labels["reason"]: sample.value for sample in family.samples}

    before = rejected()
    engine.error = QueueFull("9 requests are waiting")
    assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 429
    engine.is_running = False
    engine.error = None
    assert client.get("/health").status_code == 503
    assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 503
    after = rejected()
    assert after["queue_full"] == before["queue_full"] + 1
    assert after["engine_stopped"] == before.get("engine_stopped", 0) + 1


def test_rejections_below_a_prefix_count() -> None:
    """A proxy may publish the server under a path of its own."""
    refusals = Refusals()
    for path in ("/llm/v1/completions", "/llm/ready"):
        scope = {"type": "http", "path": path, "root_path": "/llm"}
        refusals.note(scope, QueueFull("9 requests are waiting"))
    assert refusals.counts == {"queue_full": 1}
