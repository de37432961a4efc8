"""Blocks that sharing saves, for the mix of lengths of a trace: the PagedAttention paper's figure.

    python benchmarks/branch_memory.py conversation_trace.jsonl [--requests N] [--json FILE]

Every k-th request of the trace, its lengths divided by 16, runs alone on the default model in
float32, with n samples and as a beam search of width n; the tokens are random, as the trace's are
not public. Saved = 1 - (sum of peaks) / (sum of peaks with nothing shared), in percent; unshared, n
answers of T tokens hold n * ceil((P + T - 1) / block size) blocks at their end.
(W. Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention,
SOSP 2023, section 6.3.)
"""

import argparse
import json
import random
from pathlib import Path

from rich.console import Console
from rich.table import Table

from prefixkv import default_model
from prefixkv.config import EngineConfig
from prefixkv.engine import Engine
from prefixkv.sampling_params import SamplingParams

SCALE, BLOCK_SIZE, WIDTHS = 16, 16, (2, 4, 8)


def lengths(trace: Path, count: int) -> list[tuple[int, int]]:
    """Prompt and output tokens of `count` requests, evenly over the trace."""
    lines = trace.read_text(encoding="utf-8").splitlines()
    picked = lines[:: len(lines) // count][:count]
    requests = [json.loads(line) for line in picked]
    return [
        (max(1, r["input_length"] // SCALE), max(2, r["output_length"] // SCALE)) for r in requests
    ]


def peak(engine: Engine, prompt: list[int], params: SamplingParams) -> int:
    """Distinct blocks that one request holds at most."""
    engine.reset_prefix_cache()
    request = engine.add(prompt, params)
    while engine.has_work:
        engine.step()
    assert request.usage.num_preemptions == 0
    return request.usage.peak_num_blocks


def main() -> None:
    """Run, print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    draw = random.Random(0)
    mix = lengths(options.trace, options.requests)
    prompts = [[draw.randrange(1000, 40_000) for _ in range(p)] for p, _ in mix]
    folder = str(default_model.fetch())
    engine = Engine.load(EngineConfig(model=folder, num_blocks=4096, block_size=BLOCK_SIZE))
    table = Table("branches", "samples: peak", "unshared", "saved", "beams: peak", "saved")
    rows = []
    for n in WIDTHS:
        unshared = sum(n * -(-(p + t - 1) // BLOCK_SIZE) for p, t in mix)
        peaks = {"samples": 0, "beams": 0}
        for prompt, (_, t) in zip(prompts, mix, strict=True):
            sampling = SamplingParams(n=n, temperature=1.0, seed=1, max_tokens=t, ignore_eos=True)
            search = SamplingParams(n=n, use_beam_search=True, max_tokens=t, ignore_eos=True)
            peaks["samples"] += peak(engine, prompt, sampling)
            peaks["beams"] += peak(engine, prompt, search)
        rows.append({"n": n, "unshared": unshared, **peaks})
        saved = [f"{100 * (1 - peaks[kind] / unshared):.1f} %" for kind in ("samples", "beams")]
        table.add_row(str(n), str(peaks["samples"]), str(unshared), saved[0], str(peaks["beams"]),
                      saved[1])  # fmt: skip
    Console().print(table)
    print(f"mean prompt {sum(p for p, _ in mix) / len(mix):.0f}, "
          f"mean output {sum(t for _, t in mix) / len(mix):.1f} tokens")  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
