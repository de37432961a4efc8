"""Beams as the scheduler sees them: they step together, fork where they go on twice, or go."""

import random

import pytest
from fake_executor import IDENTITY, FakeExecutor
from fake_kv import content_identity

from prefixkv.errors import RequestTooLarge
from prefixkv.request import Branch, Request
from prefixkv.sampling_params import SamplingParams

PROMPT = [0, 1, 2, 0, 1, 2, 0]


def add(executor: FakeExecutor, width: int, max_tokens: int) -> Request:
    """Queue a beam search."""
    params = SamplingParams(n=width, use_beam_search=True, max_tokens=max_tokens)
    request = Request(
        str(executor.num_requests), PROMPT, params, IDENTITY,
        number=executor.num_requests, max_tokens=max_tokens,
    )  # fmt: skip
    executor.num_requests += 1
    executor.scheduler.add(request)
    return request


class Searcher:
    """Runs one search over the fake KV; knows the tokens of each beam as plain lists."""

    def __init__(self, executor: FakeExecutor, request: Request) -> None:
        self.executor = executor
        self.request = request
        self.tokens: dict[Branch, list[int]] = {request.branches[0]: list(PROMPT)}

    def step(self, rng: random.Random) -> None:
        """One step, in which every beam reads its own slots; then a random choice goes on."""
        executor, request = self.executor, self.request
        batch = executor.scheduler.schedule()
        executor.kv.copy(executor.cache.pending_copies)
        executor.cache.pool.finish_copies()
        for item in batch:
            executor.kv.write(item.sequence, self.tokens[item.branch])
        for item in batch:
            item.sequence.commit()
        for item in batch:
            tokens = self.tokens[item.branch]
            for position, content in enumerate(executor.kv.read(item.sequence)):
                expected = (content_identity(item.sequence.root), tuple(tokens[: position + 1]))
                assert content == expected, f"{item.branch} reads {content} at {position}"
        if all(item.samples for item in batch):
            parents = [self.tokens[branch] for branch in request.branches]
            width = request.params.n
            chosen = [(rng.randrange(len(parents)), rng.randrange(3)) for _ in range(width)]
            executor.scheduler.branch_out(request, chosen)
            lists = [[*parents[place], token] for place, token in chosen]
            self.tokens = dict(zip(request.branches, lists, strict=True))
        executor.kv.poison_free(executor.cache)
        executor.scheduler.check_invariants()


class FirstOnly(random.Random):
    """All go on from the first beam."""

    def randrange(self, *_: object) -> int:
        """Never anything else."""
        return 0


@pytest.mark.parametrize("seed", range(40))
def test_every_beam_reads_its_own_tokens(seed: int) -> None:
    """Whoever goes on from whom, and however often: no slot lies, and nothing is held after."""
    rng = random.Random(seed)
    width, max_tokens = rng.randint(1, 5), 7
    executor = FakeExecutor(60, rng.randint(1, 4), max_num_batched_tokens=8)
    searcher = Searcher(executor, add(executor, width, max_tokens))
    for _ in range(max_tokens + 2):
        searcher.step(rng)
        assert len(searcher.request.branches) in (1, width)
    held = searcher.request.num_blocks_held
    assert held <= searcher.request.num_blocks_at_most(executor.cache.block_size)
    executor.scheduler.finish(searcher.request)
    executor.scheduler.check_invariants()
    assert executor.cache.usage == 0


def test_pruned_beams_go_to_the_cold_end() -> None:
    """What they computed is the first to be evicted."""
    executor = FakeExecutor(40, 1)
    searcher = Searcher(executor, add(executor, 3, 4))
    searcher.step(random.Random(1))
    for _ in range(2):
        searcher.step(FirstOnly())
    cold = [block.priority for block in executor.cache.pool.order]
    assert cold
    assert cold == [-1] * len(cold)


def test_a_width_that_never_fits_is_refused() -> None:
    """With the arithmetic: the prompt once, and the worst case of each beam."""
    executor = FakeExecutor(10, 4)
    message = "7 prompt tokens and 6 output tokens in each of 4 beams need 13 blocks of 4 tokens"
    with pytest.raises(RequestTooLarge, match=f"{message}, the pool has 10"):
        add(executor, 4, 6)
    assert not executor.scheduler.has_work


def test_searches_run_one_after_another_where_the_pool_holds_one() -> None:
    """Room is promised to the end of a search, so the second one waits."""
    executor = FakeExecutor(13, 4)
    first, second = add(executor, 4, 6), add(executor, 4, 6)
    searcher, rng = Searcher(executor, first), random.Random(1)
    for _ in range(4):
        searcher.step(rng)
        assert second.branches[0].sequence is None
    executor.scheduler.finish(first)
    assert [item.branch.request for item in executor.scheduler.schedule()] == [second]
