"""What nobody wrote is never read: pools of NaN, zeros and 1e4 change no bit of a run.

A schedule is drawn from a seed before anything runs, so that the same events meet every pool.
"""

import logging
import random
from collections import Counter
from typing import Any

import pytest
import torch
from engine_oracle import KINDS, NAN, Fault
from engine_world import EngineWorld

from prefixkv.sampling_params import SamplingParams

NUM_SCHEDULES = {"reference": 20, "cpu": 8}
NUM_EVENTS = 30
POISONS = (NAN, 0.0, 1e4)
EVENTS = {"step": 12, "add": 5, "add like": 5, "fail": 3, "abort": 2, "reset": 1}
FAULTS = [
    *(Fault(where, 1) for where in ("copies", "keys", "values", "logits")),
    *(Fault(where) for where in ("forward", "layer", "values", "push")),
    *(
        Fault(where, 0, KeyboardInterrupt)
        for where in ("copies", "layer", "committed", "publish", "match")
    ),
]


def make_options(rng: random.Random) -> dict[str, Any]:
    """A pool that is too small, small chunks."""
    return {
        "num_blocks": rng.randint(4, 10),
        "block_size": rng.choice([1, 2, 4]),
        "max_prefill_chunk": rng.choice([None, 1, 3]),
        "max_num_batched_tokens": rng.choice([3, 7, 64]),
        "max_num_seqs": rng.choice([2, 4]),
    }


def run_schedule(seed: int, backend: str, poison: float, counts: Counter[str]) -> EngineWorld:
    """Run one schedule to its end, then let what is unfinished run on."""
    rng = random.Random(seed)
    dtype = torch.float64 if backend == "reference" else torch.float32
    options = {**make_options(rng), "attention_backend": backend, "seed": seed}
    world = EngineWorld(KINDS[seed % 2], counts, dtype=dtype, poison=poison, **options)
    names, weights = list(EVENTS), list(EVENTS.values())
    for _ in range(NUM_EVENTS):
        happen(world, rng.choices(names, weights)[0], random.Random(rng.random()))
        world.check()
    while world.live:
        world.step()
    world.finish()
    return world


def happen(world: EngineWorld, event: str, rng: random.Random) -> None:
    """One event; those that need a request do nothing if there is none."""
    temperature = rng.choice([0.0, 1.5])
    params = SamplingParams(
        n=rng.choice([1, 1, 2]),
        max_tokens=rng.randint(1, 4),
        temperature=temperature,
        ignore_eos=True,
    )
    salt = rng.choice([None, None, "a"])
    if event == "add":
        world.add([rng.choice([3, 4]) for _ in range(rng.randint(1, 10))], params, salt, 0)
    elif event == "add like" and world.known:
        _, tokens = rng.choice(world.known)
        cut = rng.randint(1, len(tokens))
        tail = [rng.choice([3, 4]) for _ in range(rng.randint(0, 4))]
        world.add(tokens[:cut] + tail, params, salt, 0)
    elif event == "reset":
        world.reset()
    elif world.live and event == "abort":
        world.abort(rng.choice(list(world.live)))
    elif world.live:
        world.step(rng.choice(FAULTS) if event == "fail" else None)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_no_bit_depends_on_what_nobody_wrote(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps, failures, aborts and preemptions: the same bits and ids over any content."""
    caplog.set_level(logging.CRITICAL, "prefixkv")  # planted failures
    counts: Counter[str] = Counter()
    for seed in range(NUM_SCHEDULES[backend]):
        first, *others = [run_schedule(seed, backend, poison, counts) for poison in POISONS]
        for other in others:
            assert other.known == first.known
            assert len(other.logits) == len(first.logits)
            for mine, its in zip(other.logits, first.logits, strict=True):
                assert bits(mine) == bits(its)
    print(counts)  # noqa: T201 # shown with -s and on failure
    for what in ("preemptions", "evictions", "copies on write", "forks", "partial hits"):
        assert counts[what] > 0, what


def bits(tensor: torch.Tensor) -> bytes:
    """The content, in which one NaN equals another of the same bits."""
    return tensor.numpy().tobytes()
