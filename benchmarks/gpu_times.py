"""What is asked of the times that `gpu_speed.py` takes, and the table of them."""

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.gpu_session import Session

LARGE_BYTES = 2**26


def judge(session: Session, rows: list[dict[str, Any]]) -> None:
    """What is asked of speed, beside the worst that was measured."""
    decodes = [row for row in rows if row["case"].startswith("decode")]
    large = [row for row in decodes if row["unique_bytes"] >= LARGE_BYTES]
    copies = [row for row in rows if row["case"].startswith("block copy, 1024")]
    asked: list[tuple[str, list[float | None], Callable[[list[float]], float], float]] = [
        ("decode, >= 64 MiB of K and V a layer: >= 0.85 of the copy's bandwidth",
         [row["of_copy"] for row in large if not row["sharing"]], min, 0.85),
        ("shared, >= 64 MiB of distinct K and V: <= 1.35 of the time to copy them",
         [over(row) for row in large if row["sharing"]], max, 1.35),
        ("shared, all: <= 1.35 of the time to copy the distinct bytes",
         [over(row) for row in decodes if row["sharing"]], max, 1.35),
        ("nothing shared: <= 1.02 of the plain plan's time",
         [row["flushed_us"] / row["plain_us"] for row in decodes if not row["sharing"]],
         max, 1.02),
        ("block copy: >= 0.8 of the copy's bandwidth", [row["of_copy"] for row in copies],
         min, 0.8),
    ]  # fmt: skip
    for text, values, worst, limit in asked:
        known = [value for value in values if value is not None]
        if session.smoke or not known:
            session.check(text, "not measured", None, speed=True)
            continue
        value = worst(known)
        met = value >= limit if worst is min else value <= limit
        session.check(text, f"worst of {len(known)}: {value:.3f}", met, speed=True)


def over(row: dict[str, Any]) -> float | None:
    """How many times the floor it took."""
    return None if row["of_copy"] is None else 1 / row["of_copy"]


def print_times(console: Console, report: dict[str, Any]) -> None:
    """One line a case."""
    if not report.get("speed"):
        return
    columns = ("flushed_us", "plain_us", "resident_us", "launched_us", "floor_us", "planning_us")
    table = Table("case", "MB", *columns, "% of copy", "TFLOP/s", "others, us")
    for row in report["speed"]:
        cells = ["" if row.get(name) is None else f"{row[name]:.1f}" for name in columns]
        share = row.get("of_copy")
        rivals = ", ".join(
            f"{name} {value:.0f}" if isinstance(value, float) else f"{name}: none"
            for name, value in row.get("rivals", {}).items()
        )
        moved = f"{row['moved_bytes'] / 1e6:.1f}" if "moved_bytes" in row else ""
        flops = f"{row['tflops']:.0f}" if "tflops" in row else ""
        percent = "" if share is None else f"{share:.0%}"
        table.add_row(row["case"], moved, *cells, percent, flops, rivals)
    console.print(table)
