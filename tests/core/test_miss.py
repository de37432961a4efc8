"""A miss explains itself."""

from array import array

import pytest
from fake_executor import IDENTITY, FakeExecutor

from prefixkv.block import Block
from prefixkv.cache_control import CacheControl, Miss
from prefixkv.forgotten import Forgotten
from prefixkv.identity import ModelIdentity
from prefixkv.miss import explain
from prefixkv.sequence import Sequence

PROMPT = [0, 1, 2, 0, 1, 2, 1, 0, 2, 2, 0]
TENANT = ModelIdentity(architecture="fake", salt="tenant")
OTHER_TENANT = ModelIdentity(architecture="fake", salt="other tenant")
OTHER_MODEL = ModelIdentity(architecture="other", salt="tenant")


def miss(
    executor: FakeExecutor,
    prompt: list[int],
    identity: ModelIdentity = IDENTITY,
    *,
    looks_at_other_salts: bool = False,
) -> Miss:
    """Why not all of a prompt was found; the request runs to its end."""
    control = CacheControl(looks_at_other_salts=looks_at_other_salts)
    request = executor.add(prompt, 2, identity, cache_control=control)
    executor.run()
    assert request.miss is not None
    assert request.miss.num_cached_tokens == request.usage.num_cached_tokens
    return request.miss


def test_what_was_never_there_and_what_is_all_there() -> None:
    executor = FakeExecutor(40, 4)
    assert miss(executor, PROMPT) == Miss("never_computed", 0)
    assert miss(executor, PROMPT) == Miss("none", 10)
    assert miss(executor, [1]) == Miss("none", 0)
    assert miss(executor, [2, 2, 2]) == Miss("never_computed", 0)
    assert executor.scheduler.misses == {"never_computed": 2, "none": 2}


def test_a_prompt_that_goes_on_where_the_cache_ends_was_never_computed() -> None:
    executor = FakeExecutor(40, 4)
    request = executor.add(PROMPT, 2)
    executor.run()
    spoken = [*PROMPT, *executor.finished[request.request_id]]
    assert miss(executor, [*spoken, 0, 0, 0]) == Miss("never_computed", 12)


@pytest.mark.parametrize("place", range(1, 10))
def test_where_the_cache_goes_on_differently_its_tokens_are_told(place: int) -> None:
    """Also in the middle of a block, and across blocks; at most 16."""
    executor = FakeExecutor(40, 4)
    first = executor.add(PROMPT, 12)
    executor.run()
    cached = [*PROMPT, *executor.finished[first.request_id]][:-1]
    # a fourth token, so that nothing goes on by chance
    told = miss(executor, [*PROMPT[:place], 3, 3, 3, 3, 3])
    assert told == Miss("differs", place, tuple(cached[place : place + 16]))


def test_who_shares_not_even_the_first_token_is_told_of_nobody_else() -> None:
    executor = FakeExecutor(40, 4)
    miss(executor, PROMPT)
    assert miss(executor, [3, *PROMPT]) == Miss("never_computed", 0)
    assert miss(executor, PROMPT, TENANT) == Miss("never_computed", 0)


def test_of_many_that_go_on_differently_one_is_told() -> None:
    executor = FakeExecutor(60, 4)
    for token in (0, 1, 2):
        for last in (0, 1):
            miss(executor, [*PROMPT[:8], token, last, 0, 0, 0])
    told = miss(executor, [*PROMPT[:8], 3, 3])
    assert (told.reason, told.num_cached_tokens) == ("differs", 8)
    assert told.cached_token_ids[0] in (0, 1, 2)


def test_an_evicted_block_is_remembered() -> None:
    """That it was evicted counts for more than that others went on differently there."""
    executor = FakeExecutor(10, 4)
    miss(executor, PROMPT)
    assert executor.cache.pool.reserve(9)
    assert executor.cache.pool.num_evicted > 0
    told = miss(executor, PROMPT)
    assert told.reason == "evicted"
    assert executor.cache.pool.reserve(10)
    miss(executor, [*PROMPT[:4], 3, 3, 3, 3, 3])
    assert miss(executor, PROMPT) == Miss("evicted", 4)
    assert miss(executor, PROMPT) == Miss("none", 10)


def test_of_a_long_chain_that_was_evicted_at_once_enough_is_remembered() -> None:
    """Whatever beginning of it somebody else brings back, a resend says what became of the rest."""
    prompt = [(i * i + i // 7) % 3 for i in range(60)]
    for depth in range(15):
        executor = FakeExecutor(40, 4)
        miss(executor, prompt)
        assert executor.cache.pool.reserve(40)
        assert len(executor.cache.pool.forgotten) < 5
        told = miss(executor, [*prompt[: depth * 4], 3])
        assert told.reason == ("evicted" if depth else "none")
        told = miss(executor, prompt)
        assert told == Miss("evicted", depth * 4)


def test_of_many_short_chains_that_were_evicted_at_once_each_is_remembered() -> None:
    executor = FakeExecutor(40, 4)
    prompts = [[first, second, 3, 3, 3, 3, 3, 3, 3] for first in range(3) for second in range(3)]
    for prompt in prompts:
        miss(executor, prompt)
    assert executor.cache.pool.reserve(40)
    reasons = [miss(executor, prompt).reason for prompt in prompts]
    assert reasons == ["evicted"] * 9


def test_a_reset_and_new_weights_are_remembered() -> None:
    executor = FakeExecutor(40, 4)
    miss(executor, PROMPT)
    executor.cache.reset()
    assert miss(executor, PROMPT) == Miss("reset", 0)
    executor.cache.weights_changed()
    assert miss(executor, PROMPT) == Miss("weights_changed", 0)
    assert miss(executor, [1, 1, 1, 1, 1]) == Miss("never_computed", 0)
    executor.cache.weights_changed()
    executor.cache.weights_changed()
    assert miss(executor, PROMPT) == Miss("weights_changed", 0)
    assert executor.cache.pool.reserve(40)
    assert miss(executor, PROMPT).reason == "evicted", "what happened last"


def test_what_another_tenant_has_is_told_only_to_who_may_ask() -> None:
    executor = FakeExecutor(40, 4)
    miss(executor, PROMPT, TENANT)
    miss(executor, PROMPT, OTHER_MODEL)
    for salt in range(3):
        miss(executor, [2, 2], ModelIdentity(architecture="fake", salt=str(salt)))
    assert miss(executor, PROMPT, OTHER_TENANT) == Miss("never_computed", 0)
    assert miss(executor, PROMPT[:8], looks_at_other_salts=True) == Miss("other_salt", 0)
    assert miss(executor, [*PROMPT[:8], 3, 3], looks_at_other_salts=True).reason == "differs"
    assert miss(executor, [3, 3, 3], looks_at_other_salts=True) == Miss("never_computed", 0)


def test_another_model_is_not_another_tenant() -> None:
    executor = FakeExecutor(40, 4)
    miss(executor, PROMPT, OTHER_MODEL)
    assert miss(executor, PROMPT, looks_at_other_salts=True) == Miss("never_computed", 0)


def test_without_a_cache_that_is_the_reason() -> None:
    executor = FakeExecutor(40, 4, enabled=False)
    assert miss(executor, PROMPT) == Miss("disabled", 0)
    assert miss(executor, PROMPT) == Miss("disabled", 0)


def test_what_is_there_and_could_not_be_used_does_not_differ() -> None:
    """Part of a block was found, and given up for want of room for its copy."""
    executor = FakeExecutor(40, 4)
    miss(executor, PROMPT)
    prompt = array("i", PROMPT)
    sequence = Sequence.open(executor.cache, IDENTITY, prompt)
    assert sequence.drop_partial()
    assert explain(sequence, prompt) == Miss("never_computed", 8)
    sequence.rollback(2)
    assert explain(sequence, prompt) == Miss("never_computed", 2)
    sequence.release()


def test_the_memory_of_what_was_forgotten_is_bounded_and_the_last_counts() -> None:
    memory = Forgotten(capacity=20)
    digests = [bytes([i]) for i in range(200)]
    memory.add(digests[:100], "reset")
    assert len(memory) <= 20
    assert memory.reason(digests[0]) is None
    assert memory.reason(digests[99]) == "reset"
    memory.evicted += digests[95:105]
    assert memory.reason(digests[99]) == "evicted"
    assert memory.reason(digests[104]) == "evicted"
    memory.add(digests[104:105], "weights_changed")
    assert memory.reason(digests[104]) == "weights_changed"
    for size in (9, 10, 9, 10, 3, 9):
        memory.add(digests[110 : 110 + size], "reset")
        assert len(memory) <= 20
        digests = digests[size:]
        assert memory.reason(digests[109]) == "reset"


def test_evicted_digests_are_filed_before_they_are_many() -> None:
    memory, block = Forgotten(), Block(1)
    for i in range(10_000):
        block.digest = i.to_bytes(4, "big")
        memory.note_evicted([block])
        assert len(memory.evicted) <= 4097
    assert len(memory) < 15_000
    assert memory.reason(bytes(4)) == "evicted"
