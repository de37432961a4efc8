"""A bounded memory of things that share parts."""

from prefixkv.api.history.shared_lru import SharedLRU
from prefixkv.api.history.transcript import Transcript, transcript_of


def test_parts_count_once_and_are_gone_with_the_last_that_has_them() -> None:
    """A beginning lives as long as what goes on from it."""
    memory: SharedLRU[str, Transcript] = SharedLRU(10**6)
    trunk = transcript_of("x" * 1000, range(1000))
    kids = [trunk.followed_by("y", [i]) for i in range(3)]
    for name, value in zip("abc", kids, strict=True):
        memory.put(name, value)
    memory.put("trunk", trunk)
    total = memory.num_bytes
    assert total == trunk.num_bytes + sum(kid.num_bytes for kid in kids)
    memory.put("trunk", trunk)
    memory.pop("trunk")
    assert memory.num_bytes == total
    for name in "abc":
        memory.pop(name)
    assert (memory.num_bytes, len(memory), memory.pop("a")) == (0, 0, None)


def test_what_is_too_big_displaces_nothing_else() -> None:
    """One client's giant is not the end of what all others have."""
    memory: SharedLRU[str, Transcript] = SharedLRU(5000)
    memory.put("a", transcript_of("x", [1]))
    memory.put("b", transcript_of("x", [1]))
    memory.put("giant", transcript_of("x" * 10_000, [1]))
    assert (len(memory), memory.get("giant"), memory.num_evicted) == (2, None, 1)

    memory.put("a", transcript_of("x" * 10_000, [1]))
    assert (len(memory), memory.get("a")) == (1, None)


def test_who_has_the_most_lets_go_first() -> None:
    """By bytes, and by number: a flood of one owner leaves what others have."""
    memory: SharedLRU[str, Transcript] = SharedLRU(10_000)
    memory.put("mine", transcript_of("x" * 1000, [1]), "me")
    for i in range(50):
        memory.put(f"flood {i}", transcript_of("x" * 1000, [1]), "you")
        assert memory.num_bytes <= 10_000
    assert memory.get("mine") is not None
    assert memory.get("flood 49") is not None
    assert len(memory) + memory.num_evicted == 51

    few: SharedLRU[str, Transcript] = SharedLRU(10**6, max_entries=3)
    few.put("mine", transcript_of("x" * 1000, [1]), "me")
    for name in "abcd":
        few.put(name, transcript_of("x", [1]), "you")
    assert [name for name in ("mine", *"abcd") if few.get(name)] == ["mine", "c", "d"]
    few.put("d", transcript_of("x", [1]), "me")  # whoever put it last owns it
    few.put("e", transcript_of("x", [1]), "you")
    assert (len(few), few.get("mine")) == (3, None)
