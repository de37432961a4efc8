"""The Triton kernels and the engine on a GPU: right, and how fast.

    python -m benchmarks.gpu [--seconds N] [--json FILE] [--only PART ...] [--tune]

Needs no network; from the root of the repository. Exit code 1 if a result is wrong; what is asked
of speed and not met is only shown. Sections:

    correctness  every kernel against float64 on the device, NaN in all slots that nobody wrote
    engine       greedy tokens, cold and found in the cache, against transformers
    speed        medians by CUDA events; percent of a large copy's bandwidth in the same run
    tune         (only with --tune) other tiles and chunks, timed

The kernels read K and V by block tables; what they are compared with (SDPA, flash_attn) gets them
gathered, and gathering does not count. What the budget does not allow is skipped, and listed. The
JSON file is written anew after each part of a section.

    TRITON_INTERPRET=1 python -m benchmarks.gpu --smoke

runs the same code on tiny sizes on the CPU: no time of it means anything.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from rich.console import Console
from rich.table import Table

from benchmarks import gpu_correctness, gpu_speed, gpu_tiles, gpu_times
from benchmarks.gpu_session import Session
from prefixkv.kernels import triton_backend

COPIED_BYTES = 2**32
SMOKE_CHUNK = 32  # tokens of an item, so that short contexts are shared and split


def output_of(*command: str) -> str:
    """What a command prints, or why there is nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown: {error}"
    return done.stdout.strip() or "unknown"


def describe(session: Session) -> None:
    """The card, the versions, and how fast it copies."""
    found: dict[str, Any] = {
        "torch": torch.__version__, "triton": triton.__version__, "python": sys.version.split()[0],
        "cuda": torch.version.cuda, "commit": output_of("git", "rev-parse", "--short", "HEAD"),
    }  # fmt: skip
    if session.device.type == "cuda":
        properties = torch.cuda.get_device_properties(session.device)
        found.update(
            card=properties.name, multiprocessors=properties.multi_processor_count,
            memory_gib=round(properties.total_memory / 2**30, 1),
            driver=output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        )  # fmt: skip
        source = torch.ones(COPIED_BYTES, dtype=torch.uint8, device=session.device)
        target = torch.empty_like(source)
        us = session.median_us({"copy": lambda: target.copy_(source)})["copy"]
        session.copy_bandwidth = 2e6 * COPIED_BYTES / us
        found["copy_tb_s"] = session.copy_bandwidth / 1e12
        del source, target
        session.free()
    session.report["environment"] = found
    for name, value in found.items():
        print(f"{name:16} {value}", flush=True)


def run_engine(session: Session, until: float) -> None:
    """The engine's part; where transformers is missing, the others still run."""
    try:
        from benchmarks import gpu_engine
    except ImportError as error:
        session.skip("engine", "all", f"cannot be imported: {error}")
        session.check("engine: transformers' tokens", "not run", None)
        return
    gpu_engine.run(session, until)


# the share of the budget that is left for the sections after it
SECTIONS: dict[str, tuple[Callable[[Session, float], None], float]] = {
    "correctness": (gpu_correctness.run, 0.6),
    "engine": (run_engine, 0.45),
    "speed": (gpu_speed.run, 0.0),
    "tune": (gpu_tiles.run, 0.0),
}


def print_report(session: Session) -> None:
    """Cases that are wrong, the times, and what was asked beside what was measured."""
    console = Console(width=None if sys.stdout.isatty() else 150)
    for row in session.report.get("correctness", []):
        if not row["ok"]:
            console.print(f"WRONG {row['shape']}: {row['case']}: {row['error']}", markup=False)
    gpu_times.print_times(console, session.report)
    table = Table("asked", "measured", "met")
    for check in session.checks:
        met = {True: "yes", False: "NO", None: "-"}[check["met"]]
        table.add_row(check["asked"], check["measured"], met)
    console.print(table)
    if session.smoke:
        console.print("smoke: interpreted on the CPU, no time means anything")


def run(options: argparse.Namespace) -> int:
    """Run the sections; 1 if a result is wrong."""
    device = torch.device("cpu" if options.smoke else "cuda")
    session = Session(device, options.smoke, options.seconds, options.json)
    torch.manual_seed(0)
    if options.smoke:
        triton_backend.PLAN_CHUNK = SMOKE_CHUNK
    describe(session)
    wanted = options.only or [name for name in SECTIONS if name != "tune" or options.tune]
    for name in wanted:
        section, rest = SECTIONS[name]
        # with --tune speed leaves a third; a section alone has all of the budget
        if name == "speed" and "tune" in wanted:
            rest = 0.3
        section(session, rest * session.seconds if len(wanted) > 1 else 0.0)
        session.save()
    wrong = [c for c in session.checks if c["met"] is False and not c["speed"]]
    session.report["failed"] = bool(wrong)
    session.save()
    print_report(session)
    return 1 if wrong else 0


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; complains where nothing could run."""
    parser = argparse.ArgumentParser(prog="gpu", description=str(__doc__).splitlines()[0])
    parser.add_argument("--seconds", type=float, default=420, help="of all sections together")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS))
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args(arguments)
    if options.smoke != triton_backend.INTERPRETED:
        parser.error("--smoke goes with TRITON_INTERPRET=1 in the environment, and only with it")
    if not options.smoke and not torch.cuda.is_available():
        parser.error("there is no GPU; see --smoke")
    return options


if __name__ == "__main__":
    sys.exit(run(parse()))
