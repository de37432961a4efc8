"""Half of all connections misbehave for a few seconds; `make abuse` does so for a minute."""

from abuse import abuse

NUM_CONNECTIONS, SECONDS = 40, 2.0


def test_misuse_leaves_nothing_behind() -> None:
    """Honest requests end, and rightly; then no block, task, inbox, socket or memory is held."""
    counts, before, after = abuse(NUM_CONNECTIONS, SECONDS, seed=0)

    assert counts["honest"] >= NUM_CONNECTIONS
    assert len(counts) == 7  # and each kind of misuse was there
    assert after["num_files"] == before["num_files"]
    assert after["num_tasks"] == before["num_tasks"]
    assert after["resident_bytes"] <= 1.05 * before["resident_bytes"]
