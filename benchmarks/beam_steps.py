"""What a step of a beam search costs beside the model, for a short and a long prompt.

    python benchmarks/beam_steps.py [--width W] [--json FILE]

CPU time of the engine's thread in `Engine.step` less that in `LanguageModel.forward` (attention
included), the median over the steps of three searches of 32 tokens; prompts of 400 and of 4,000
tokens by turns. Scheduling, packing, the plan, the search and the books are all in it.
"""

import argparse
import json
from pathlib import Path
from statistics import median
from time import thread_time
from typing import Any

import torch

from prefixkv import default_model
from prefixkv.config import EngineConfig
from prefixkv.engine import Engine
from prefixkv.sampling_params import SamplingParams

LENGTHS, ROUNDS = (400, 4000), 3


class Clock:
    """CPU time spent in the model, taken out of a step's."""

    def __init__(self, engine: Engine) -> None:
        self._forward = engine.model.forward
        self.seconds = 0.0
        engine.model.forward = self._timed  # type: ignore[assignment,method-assign]

    def _timed(self, *args: Any) -> torch.Tensor:
        began = thread_time()
        logits = self._forward(*args)
        self.seconds += thread_time() - began
        return logits


def step_times(engine: Engine, clock: Clock, length: int, width: int) -> list[float]:
    """Seconds beside the model of each step of one search but the first, which has the prompt."""
    engine.reset_prefix_cache()
    prompt = [1000 + length] + [2000 + i * 37 % 20_000 for i in range(length - 1)]
    params = SamplingParams(n=width, use_beam_search=True, max_tokens=32, ignore_eos=True)
    request = engine.add(prompt, params)
    times = []
    while engine.has_work:
        began, clock.seconds = thread_time(), 0.0
        engine.step()
        if request.usage.num_computed_tokens > length:
            times.append(thread_time() - began - clock.seconds)
    return times


def main() -> None:
    """Measure, print the medians and their ratio."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    folder = str(default_model.fetch())
    engine = Engine.load(EngineConfig(model=folder, num_blocks=1024, max_num_batched_tokens=512))
    clock = Clock(engine)
    times: dict[int, list[float]] = {length: [] for length in LENGTHS}
    for _ in range(ROUNDS):
        for length in LENGTHS:
            times[length] += step_times(engine, clock, length, options.width)
    medians = {length: median(found) * 1e3 for length, found in times.items()}
    for length, milliseconds in medians.items():
        print(f"{length} tokens, width {options.width}: {milliseconds:.2f} ms a step")
    print(f"ratio {medians[LENGTHS[1]] / medians[LENGTHS[0]]:.2f}")
    if options.json:
        options.json.write_text(json.dumps(medians))


if __name__ == "__main__":
    main()
