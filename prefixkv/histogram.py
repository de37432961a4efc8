"""Counts of values by bucket, cheap enough for every token."""

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """How many values lie at or below each bound, and their sum.

    Prometheus' own takes one value at a time, under a lock; here one call counts all streams of a
    step that waited equally long. Kept by one thread.

    Args:
        bounds: upper, inclusive, in rising order; values above the last one are counted too.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, or several that are equal."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def copy(self) -> "Histogram":
        """Return one that stands still."""
        copied = Histogram(self.bounds)
        copied.counts, copied.sum = self.counts[:], self.sum
        return copied


def one_two_five(limit: int) -> list[float]:
    """Return the bounds 1, 2, 5, 10, 20 and so on, up to `limit`."""
    bounds: list[float] = []
    power = 1
    while power <= limit:
        bounds += [power * digit for digit in (1, 2, 5) if power * digit <= limit]
        power *= 10
    return bounds
