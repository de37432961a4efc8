"""Runs of a real engine under an eye that poisons whatever must not be read."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from prefixkv.block import FREE
from prefixkv.engine import Engine
from prefixkv.outputs import BranchOutput, OutputDelta
from prefixkv.request import Request
from prefixkv.sampling_params import SamplingParams

MOST_STEPS = 1000


@dataclass
class Run:
    """What came out: ids by request, and the logits of every step."""

    token_ids: dict[str, list[int]] = field(default_factory=dict)
    text: dict[str, str] = field(default_factory=dict)
    finish_reasons: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    logits: list[torch.Tensor] = field(default_factory=list)


def greedy(max_tokens: int) -> SamplingParams:
    """Greedy decoding."""
    return SamplingParams(temperature=0, max_tokens=max_tokens)


def poison(engine: Engine, value: float) -> None:
    """Overwrite every slot that nobody has written, in free blocks and in half-filled ones."""
    pool = engine.kv_cache.pool
    block_size = engine.cache.block_size
    for block in engine.cache.pool.blocks:
        written = 0 if block.state == FREE else len(block.tokens) // 4
        if written < block_size:
            pool[block.block_id, :, :, :, written:] = value


def run(
    engine: Engine,
    prompts: Sequence[Sequence[int]] = (),
    max_tokens: int = 8,
    *,
    poison_value: float | None = float("nan"),
) -> tuple[Run, list[Request]]:
    """Add prompts, run until nothing is left, and check the books after each step."""
    requests = [engine.add(list(prompt), greedy(max_tokens)) for prompt in prompts]
    result = Run()
    forward = engine.model.forward

    def recording(*args: torch.Tensor) -> torch.Tensor:
        logits = forward(*args)  # type: ignore[arg-type] # passed through
        result.logits.append(logits.clone())
        return logits

    engine.model.forward = recording  # type: ignore[assignment,method-assign]
    try:
        while engine.has_work:
            if poison_value is not None:
                poison(engine, poison_value)
            collect(engine, result)
    finally:
        engine.model.forward = forward  # type: ignore[method-assign]
    return result, requests


def collect(engine: Engine, result: Run) -> None:
    """One step, its deltas added to `result`."""
    for delta in engine.step():
        key = delta.request_id
        result.token_ids.setdefault(key, []).extend(delta.token_ids)
        result.text[key] = result.text.get(key, "") + delta.text
        if delta.finish_reason is not None:
            result.finish_reasons[key] = delta.finish_reason
        if delta.error is not None:
            result.errors[key] = delta.error
    engine.check_invariants()


def assert_idle(engine: Engine) -> None:
    """Nothing is held: all blocks are free or can be had."""
    engine.check_invariants()
    assert engine.cache.usage == 0
    assert not engine.cache.sequences
    assert not engine.cache.pool.copies


def steps(engine: Engine) -> Iterator[OutputDelta]:
    """Step to the end, whatever is interrupted, over a pool whose unwritten slots are NaN."""
    for _ in range(MOST_STEPS):
        if not engine.has_work:
            return
        poison(engine, float("nan"))
        with contextlib.suppress(KeyboardInterrupt):
            yield from engine.step()
        engine.check_invariants()
    raise AssertionError(f"{MOST_STEPS} steps, and no end")


def outputs_of(engine: Engine, *requests: Request) -> list[list[BranchOutput]]:
    """Run to the end; of each request its outputs by index. No request may fail."""
    outputs = {r.request_id: [BranchOutput(i) for i in range(r.params.n)] for r in requests}
    for delta in steps(engine):
        assert delta.error is None
        if delta.request_id in outputs:
            outputs[delta.request_id][delta.index].add(delta)
    assert_idle(engine)
    return list(outputs.values())


def interrupt(monkeypatch: pytest.MonkeyPatch, moment: int, *places: tuple[Any, str]) -> list[int]:
    """Let one call be interrupted before it begins: that of `moment` among those of all places.

    Returns a countdown; it is below 0 once that call has come.
    """
    countdown = [moment]

    def wrap(call: Any) -> Any:
        def interrupted(*args: Any, **kwargs: Any) -> Any:
            countdown[0] -= 1
            if countdown[0] == -1:
                raise KeyboardInterrupt
            return call(*args, **kwargs)

        return interrupted

    for owner, name in places:
        monkeypatch.setattr(owner, name, wrap(getattr(owner, name)))
    return countdown
