"""What an engine must never do to a client, even if it does it to us."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from prefixkv.api.generation import collect, generate
from prefixkv.errors import StepFailed
from prefixkv.outputs import FinishReason, OutputDelta, Usage
from prefixkv.sampling_params import SamplingParams
from tests.api.fake_engine import FakeEngine


class ScriptedEngine(FakeEngine):
    """Yields one delta with a given finish reason, or ends without one."""

    def __init__(self, reason: FinishReason | None) -> None:
        super().__init__()
        self._reason = reason

    async def generate(self, *args: object, **kwargs: object) -> AsyncGenerator[OutputDelta, None]:
        """Yield the delta."""
        yield OutputDelta("r", "x", (1,), Usage(), self._reason, error="it broke")


def run(engine: FakeEngine, num_prompts: int, n: int = 1) -> None:
    """Run the prompts to their end."""
    prompts = [[1]] * num_prompts
    deltas = generate(engine, prompts, SamplingParams(n=n), response_id="id", salt=None, priority=0)
    asyncio.run(collect(deltas, num_prompts, n))


@pytest.mark.parametrize("num_prompts", [1, 2])
@pytest.mark.parametrize(
    ("reason", "message"), [("error", "it broke"), ("abort", "it broke"), (None, "without a")]
)
def test_only_stop_and_length_end_an_answer(
    reason: FinishReason | None, message: str, num_prompts: int
) -> None:
    """Clients crash on other finish reasons and on none, so those become errors."""
    with pytest.raises(StepFailed, match=message):
        run(ScriptedEngine(reason), num_prompts)


@pytest.mark.parametrize("num_prompts", [1, 2])
def test_an_output_that_never_ends_is_an_error(num_prompts: int) -> None:
    """One of two has ended; the engine says no more."""
    with pytest.raises(StepFailed, match="1 outputs without a finish reason"):
        run(ScriptedEngine("stop"), num_prompts, n=2)


def test_closing_the_answers_aborts_the_prompts() -> None:
    """Whoever stops to listen stops the engine's work, one prompt or several."""

    async def listen_once(engine: FakeEngine, num_prompts: int) -> None:
        await engine.start()
        prompts = [[1]] * num_prompts
        deltas = generate(
            engine, prompts, SamplingParams(), response_id="id", salt=None, priority=0
        )
        await anext(deltas)
        await deltas.aclose()

    for num_prompts in (1, 3):
        engine = FakeEngine()
        asyncio.run(listen_once(engine, num_prompts))
        assert engine.num_active == 0
        assert engine.num_aborts >= 1
