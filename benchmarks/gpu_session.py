"""What the parts of `benchmarks/gpu.py` share: the device, the clock, the timer and the report."""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from prefixkv.memory import memory_of

GIB = 2**30
MOST_MEMORY = 0.4  # of what is free: one pool; what it is compared with needs as much again


@dataclass
class Session:
    """One run.

    Attributes:
        smoke: tiny sizes on the CPU, kernels interpreted: no time of it means anything.
        report: what becomes the JSON file; sections add to it.
        checks: what is asked, what was measured, and whether it is met; None if not measured.
    """

    device: torch.device
    smoke: bool
    seconds: float
    path: Path | None = None
    report: dict[str, Any] = field(default_factory=dict)
    checks: list[dict[str, Any]] = field(default_factory=list)
    copy_bandwidth: float | None = None  # bytes a second, read and written
    began: float = field(default_factory=time.monotonic)

    def left(self) -> float:
        """Seconds of the budget."""
        return self.seconds - (time.monotonic() - self.began)

    def skip(self, section: str, what: str, why: str) -> None:
        """Say that something was left out."""
        self.report.setdefault("skipped", []).append({"section": section, "what": what, "why": why})
        print(f"{section}: skipped {what}: {why}", flush=True)

    def check(self, asked: str, measured: str, met: bool | None, *, speed: bool = False) -> None:
        """Add a line to the last table; a speed that is not met is no failure of the run."""
        self.checks.append({"asked": asked, "measured": measured, "met": met, "speed": speed})

    def save(self) -> None:
        """Write what there is so far."""
        self.report["checks"] = self.checks
        self.report["seconds"] = round(time.monotonic() - self.began, 1)
        if self.path is not None:
            self.path.write_text(json.dumps(self.report, indent=1), encoding="utf-8")

    def fits(self, num_bytes: int) -> bool:
        """Whether a pool of that size leaves room for what it is compared with."""
        if self.device.type != "cuda":
            return num_bytes < GIB
        return num_bytes < MOST_MEMORY * memory_of(self.device).free

    def free(self) -> None:
        """Give memory back that no tensor uses."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    def median_us(
        self, runs: dict[str, Callable[[], object]], *, repeats: int = 15, graph: bool = True
    ) -> dict[str, float]:
        """The median time of each, in turn, after a warm-up, in microseconds.

        On a GPU by events around the replay of a CUDA graph, so that launching does not count;
        what cannot be captured, or if not `graph`, is launched anew each time.
        """
        if self.smoke:
            return {name: _wall_us(run) for name, run in runs.items()}
        ready = {name: _captured(run) if graph else run for name, run in runs.items()}
        for run in ready.values():
            run()
        times: dict[str, list[float]] = {name: [] for name in ready}
        event: Any = torch.cuda.Event  # untyped
        for _ in range(repeats):
            for name, run in ready.items():
                begin = event(enable_timing=True)
                end = event(enable_timing=True)
                begin.record()
                run()
                end.record()
                end.synchronize()
                times[name].append(1e3 * begin.elapsed_time(end))
        return {name: statistics.median(values) for name, values in times.items()}


def _wall_us(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return 1e6 * (time.perf_counter() - begin)


def _captured(run: Callable[[], object]) -> Callable[[], object]:
    """Its CUDA graph's replay; the function itself if it cannot be captured."""
    # compiles and loads its kernels: in a capture nothing may be loaded
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError:  # it waits for the device, or copies from the host
        torch.cuda.synchronize()
        return run
    return graph.replay
