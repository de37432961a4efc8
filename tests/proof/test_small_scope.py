"""Exhaustive: all states of a small world up to a depth, every operation from each."""

import os

from small_scope import explore

DEPTH = int(os.environ.get("SMALL_SCOPE_DEPTH", "4"))
DEADLINE_S = float(os.environ.get("SMALL_SCOPE_SECONDS", "600"))
STATES = {1: 15, 2: 344, 3: 2_017, 4: 12_059}


def test_no_sequence_of_operations_breaks_an_invariant() -> None:
    """Nothing random: what can be reached in so many operations has been looked at."""
    report = explore(DEPTH, DEADLINE_S)
    print(  # noqa: T201 # the product of this test, shown with -s and on failure
        f"{report.num_states:,} states, {report.num_operations:,} operations, "
        f"depth {report.depth}, new at each depth: {report.states_at_depth}"
    )
    assert report.depth == DEPTH, f"{DEADLINE_S:.0f} s were not enough"
    assert report.num_states == STATES.get(DEPTH, report.num_states)
