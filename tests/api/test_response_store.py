"""The store of responses alone."""

from prefixkv.api.access.tenant import Tenant
from prefixkv.api.conversations.response_store import ResponseStore, StoredResponse, turns_of
from prefixkv.api.history.transcript import transcript_of


def stored(text: str, previous: StoredResponse | None = None) -> StoredResponse:
    """Return a response whose prompt and answer are `text`."""
    ids = list(text.encode())
    turns = turns_of([{"role": "user", "content": text}], previous.turns if previous else None)
    transcript = (
        previous.transcript.followed_by(text, ids) if previous else transcript_of(text, ids)
    )
    return StoredResponse("{}", turns, transcript, "", None, {}, None)


def test_the_store_is_bounded() -> None:
    """By number and by bytes, the least recently used first; what turns share counts once."""
    tenant = Tenant()
    few = ResponseStore(max_responses=2)
    for name in "abc":
        few.put(tenant, name, stored(name))
        assert few.has(tenant, "a")  # which is a use
    assert (len(few), few.has(tenant, "b")) == (2, False)

    one = stored("x" * 10_000)
    small = ResponseStore(max_bytes=200_000)
    small.put(tenant, "one", one)
    num_bytes = small.num_bytes
    for i in range(3):
        small.put(tenant, f"fork {i}", stored("y", one))
    assert num_bytes < small.num_bytes < 1.2 * num_bytes
    for i in range(10):
        small.put(tenant, f"other {i}", stored(f"{i}" * 10_000))
        assert small.num_bytes <= 200_000
    assert 1 < len(small) < 10
    for i in range(10):
        if small.has(tenant, f"other {i}"):
            small.delete(tenant, f"other {i}")
    assert (len(small), small.num_bytes) == (0, 0)


def test_all_that_a_client_sends_counts() -> None:
    """Variables of the template are kept as well, and characters may take four bytes."""
    plain = stored("x")
    kwargs = StoredResponse("{}", plain.turns, plain.transcript, "", None, {"a": "x" * 9000}, None)
    wide = StoredResponse("\U0001f600" * 9000, plain.turns, plain.transcript, "", None, {}, None)

    assert kwargs.num_bytes > plain.num_bytes + 9000
    assert wide.num_bytes > plain.num_bytes + 36_000


def test_an_id_is_taken_once() -> None:
    """By a response that is stored, or that began lately; each tenant has ids of its own."""
    store, tenant, other = ResponseStore(max_responses=2), Tenant("a"), Tenant("b")
    assert [store.claim(tenant, "x"), store.claim(tenant, "x"), store.claim(other, "x")] == [
        True,
        False,
        True,
    ]
    store.put(tenant, "y", stored("y"))
    assert not store.claim(tenant, "y")
    store.claim(tenant, "z")  # as many are remembered as are stored
    assert store.claim(tenant, "x")
