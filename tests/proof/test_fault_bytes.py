"""Copy-on-write, down to the bytes of a real pool.

Kinds of faults that broke other systems; docs/faults.md lists them all.
"""

from typing import Any

import pytest
import torch
from cache_world import IDENTITIES
from engine_runs import Run, assert_idle, collect, greedy, run
from fake_kv import chain_of
from tiny_models import reference_output, tiny_engine, tiny_model

from prefixkv import PrefixCache, Sequence
from prefixkv.block import Block
from prefixkv.engine import Engine
from prefixkv.hashing import pack_tokens
from prefixkv.kernels.backend import get_backend
from prefixkv.kv_cache import KVCache, KVCacheShape
from prefixkv.sequence import Sequence as CacheSequence

MODEL = IDENTITIES[0]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


class Bytes:
    """A cache over a real pool tensor; a slot holds a number that is its writer's alone."""

    def __init__(self) -> None:
        shape = KVCacheShape(
            num_layers=2, num_kv_heads=1, head_dim=8, block_size=4, dtype=torch.float32
        )
        self.cache = PrefixCache(num_blocks=32, block_size=4)
        self.kv = KVCache.allocate(shape, 32)
        self.kv.fill(torch.nan)
        self.num_written = 0

    def append(self, sequence: CacheSequence, tokens: list[int]) -> list[float]:
        """One step of a sequence; returns what went into its slots."""
        assert sequence.reserve(len(tokens))
        sequence.write(tokens)
        copies = self.cache.take_copies()
        get_backend("cpu", torch.float32).copy_blocks(
            self.kv.pool, [(c.source.block_id, c.target.block_id, c.num_slots) for c in copies]
        )
        written = []
        for position in range(sequence.num_computed_tokens, sequence.num_tokens):
            self.num_written += 1
            written.append(float(self.num_written))
            block = sequence.block_table()[position // 4]
            self.kv.pool[block, :, :, :, position % 4] = self.num_written
        sequence.commit()
        self.cache.check_invariants()
        return written

    def read(self, sequence: CacheSequence) -> list[float]:
        """What lies in the slots of a sequence; every number of a slot must be the same."""
        table = sequence.block_table()
        slots = [
            set(self.kv.pool[table[i // 4], :, :, :, i % 4].flatten().tolist())
            for i in range(sequence.num_tokens)
        ]
        assert all(len(values) == 1 for values in slots)
        return [values.pop() for values in slots]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_diverging_branches_leave_each_others_bytes_alone(order: tuple[int, ...]) -> None:
    """Forked inside a block, each going on with other tokens, within the block and then beyond."""
    world = Bytes()
    parent = Sequence.open(world.cache, MODEL, [9])
    common = world.append(parent, [1, 2, 3, 4, 5, 6])
    branches = [parent, parent.fork(), parent.fork()]
    shared = parent.block_table().tolist()
    before = world.kv.pool[shared][:, :, :, :, :2].clone()
    expected = [list(common) for _ in branches]
    for num_tokens, i in [(1, i) for i in order] + [(3, i) for i in order]:
        expected[i] += world.append(branches[i], [10 + i] * num_tokens)
        assert [world.read(branch) for branch in branches] == expected
        assert torch.equal(world.kv.pool[shared][:, :, :, :, :2], before)
    assert world.cache.stats.num_copies == 2
    assert {branch.block_table()[0] for branch in branches} == {shared[0]}
    assert len({branch.block_table()[1] for branch in branches}) == 3


@pytest.mark.parametrize("scribbled", ["source", "target"])
def test_a_copy_and_its_source_have_nothing_in_common(scribbled: str) -> None:
    """Overwriting, cutting and evicting one of them does not reach the other."""
    world = Bytes()
    source = Sequence.open(world.cache, MODEL, [9])
    common = world.append(source, [1, 2, 3, 4, 5, 6])
    target = source.fork()
    own = world.append(target, [7])
    sides = {"source": (source, common), "target": (target, common + own)}
    changed, _ = sides.pop(scribbled)
    ((kept, expected),) = sides.values()
    tokens = kept.last_block.tokens
    assert changed.last_block is not kept.last_block
    world.kv.pool[changed.last_block.block_id] = -1.0
    assert world.read(kept) == expected
    changed.rollback(5)
    changed.release()
    pool = world.cache.pool
    assert pool.reserve(pool.num_usable - 2)
    for block in pool.free:
        world.kv.pool[block.block_id] = torch.nan
    assert world.read(kept) == expected
    assert kept.last_block.tokens == tokens
    world.cache.check_invariants()


def chain(engine: Engine, tokens: list[int]) -> list[Block]:
    """The published blocks that hold a beginning of `tokens`, but for the last token."""
    block, _ = engine.cache.match(engine.cache.root(engine.identity), pack_tokens(tokens))
    return chain_of(block)


def content(engine: Engine, blocks: list[Block]) -> list[torch.Tensor]:
    """Copies of the written slots of blocks."""
    pool = engine.kv_cache.pool
    return [pool[b.block_id, :, :, :, : len(b.tokens) // 4].clone() for b in blocks]


def assert_same_bits(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert len(one) == len(other)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(("num_tokens", "donor_runs"), [(1, False), (9, False), (9, True)])
def test_recomputing_the_last_token_leaves_the_donors_bytes_alone(
    model: Any, num_tokens: int, donor_runs: bool
) -> None:
    """A prompt that ends with a full block is found but for its last slot, which is not rewritten.

    The slot is marked by less than could change an answer: written anew, it would lose the mark.
    """
    engine = tiny_engine(model)
    prompt = [(11 * i) % 250 + 3 for i in range(16)]
    donor = engine.add(prompt, greedy(num_tokens))
    donated = Run()
    for _ in range(3):
        collect(engine, donated)
    while engine.has_work and not donor_runs:
        collect(engine, donated)
    blocks = chain(engine, [*prompt, 0])
    engine.kv_cache.pool[blocks[-1].block_id, :, :, :, 3] += 1e-9
    before = content(engine, blocks)
    result, (resent,) = run(engine, [prompt], 4)

    assert len(blocks) == 4
    assert (resent.usage.num_cached_tokens, resent.usage.num_computed_tokens) == (15, 4)
    assert_same_bits(content(engine, blocks), before)
    assert result.token_ids[resent.request_id] == reference_output(model, prompt, 4)
    rest = result.token_ids.get(donor.request_id, [])
    assert donated.token_ids[donor.request_id] + rest == reference_output(model, prompt, num_tokens)
    assert bool(rest) == donor_runs
    assert_idle(engine)


@pytest.mark.parametrize("in_place", [False, True])
def test_continuations_of_a_half_filled_block_leave_its_bytes_alone(
    model: Any, in_place: bool
) -> None:
    """Two go on after all of it, one after a part of it, in one step, each with other tokens.

    The first of them writes on in place if it goes on after all of it.
    """
    engine = tiny_engine(model)
    prompt = [(11 * i) % 250 + 3 for i in range(7)]
    run(engine, [prompt], 1)
    blocks = chain(engine, [*prompt, 0])
    before = content(engine, blocks)
    assert [slots.shape[3] for slots in before] == [4, 3]
    prompts = [[*prompt[:6], 150], [*prompt, 100, 101], [*prompt, 200]]
    if in_place:
        prompts.append(prompts.pop(0))
    result, requests = run(engine, prompts, 6)

    assert engine.cache.stats.num_takeovers == in_place
    after = content(engine, blocks)
    assert_same_bits([after[0], after[1][:, :, :, :3]], before)
    outputs = [result.token_ids[r.request_id] for r in requests]
    assert outputs == [reference_output(model, p, 6) for p in prompts]
    if not in_place:
        assert [r.usage.num_cached_tokens for r in requests] == [6, 7, 7]
        assert engine.cache.stats.num_copies == 3
