"""Runs a scheduler's steps over the fake KV, with a model that is a function of the tokens."""

from collections.abc import Callable, Collection
from collections.abc import Sequence as Listing
from typing import Literal

from fake_kv import FakeKV, content_identity

from prefixkv.cache_control import CacheControl
from prefixkv.config import SchedulerConfig
from prefixkv.hashing import DigestFunction, chain_digest
from prefixkv.held_branch import HeldBranch
from prefixkv.identity import ModelIdentity
from prefixkv.prefix_cache import PrefixCache
from prefixkv.request import Branch, Request
from prefixkv.sampling_params import SamplingParams
from prefixkv.scheduler import ScheduledBranch, Scheduler
from prefixkv.sequence import Sequence

IDENTITY = ModelIdentity(architecture="fake")
VOCAB_SIZE = 3

Fault = Literal["copies", "forward", "interrupt"]


def next_token(tokens: Listing[int], branch: int = 0) -> int:
    """The fake model: a token that depends on all before it, and on the branch that draws it."""
    state = 7 + branch
    for token in tokens:
        state = (state * 31 + token + 1) % 1_000_003
    return state % VOCAB_SIZE


def serial_output(prompt: Listing[int], num_tokens: int, branch: int = 0) -> list[int]:
    """What a branch gives when it runs alone without a cache."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens, branch))
    return tokens[len(prompt) :]


class FakeExecutor:
    """A scheduler with a fake KV; each token is drawn only if every slot it reads is right."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enabled: bool = True,
        digest: DigestFunction = chain_digest,
        **limits: float | None,
    ) -> None:
        self.cache = PrefixCache(num_blocks + 1, block_size, enabled=enabled, digest=digest)
        config = SchedulerConfig(**limits)  # type: ignore[arg-type]
        self.now_s = 0.0
        self.scheduler = Scheduler(self.cache, config, clock=lambda: self.now_s)
        self.kv = FakeKV()
        self.finished: dict[str, list[int]] = {}  # of branch 0
        self.siblings: dict[tuple[str, int], list[int]] = {}
        self.num_computed = 0
        self.num_requests = 0
        self.max_steps = 10_000
        self.on_batch: Callable[[list[ScheduledBranch]], None] = lambda batch: None

    def add(
        self,
        prompt: Listing[int],
        max_tokens: int,
        identity: ModelIdentity = IDENTITY,
        priority: int = 0,
        n: int = 1,
        origin: HeldBranch | None = None,
        cache_control: CacheControl | None = None,
    ) -> Request:
        """Queue a request; a prompt that begins with what is held goes on from there."""
        params = SamplingParams(max_tokens=max_tokens, n=n)
        request = Request(
            str(self.num_requests), list(prompt), params, identity,
            number=self.num_requests, max_tokens=max_tokens, priority=priority, origin=origin,
            cache_control=cache_control,
        )  # fmt: skip
        self.num_requests += 1
        self.scheduler.add(request)
        return request

    def step(
        self, fault: Fault | None = None, *, not_finite: Collection[Request] = ()
    ) -> list[ScheduledBranch]:
        """One step, as the engine does it.

        Args:
            fault: "copies" and "forward" end its requests without another token; "interrupt" takes
                it back as if it had never been scheduled.
            not_finite: requests for which the model computes NaN; they end.
        """
        batch = self.scheduler.schedule()
        self.on_batch(batch)
        self.scheduler.check_invariants()
        self._compute(batch, fault, not_finite)
        if fault == "interrupt":
            self._take_back(batch)
        else:
            requests = [item.branch.request for item in batch]
            bad = dict.fromkeys(r for r in requests if fault is not None or r in not_finite)
            well = [item for item in batch if item.branch.request not in bad]
            for item in well:
                self._commit(item)
            for request in bad:
                self.scheduler.finish(request)
            for item in well:
                self._advance(item)
        self.scheduler.check_invariants()
        self.kv.poison_free(self.cache)
        return batch

    def _compute(
        self, batch: list[ScheduledBranch], fault: Fault | None, not_finite: Collection[Request]
    ) -> None:
        if fault == "copies":
            return
        self.kv.copy(self.cache.pending_copies)
        self.cache.pool.finish_copies()
        for item in batch:
            failed = fault is not None or item.branch.request in not_finite
            tokens = item.branch.tokens.tolist()
            self.kv.write(item.sequence, tokens, start=item.start, failed=failed)

    @staticmethod
    def _take_back(batch: list[ScheduledBranch]) -> None:
        for item in batch:
            item.sequence.discard()

    def _commit(self, item: ScheduledBranch) -> None:
        item.sequence.commit()
        self.num_computed += item.num_tokens
        item.branch.request.usage.num_computed_tokens += item.num_tokens
        self.scheduler.committed(item.branch)

    def _advance(self, item: ScheduledBranch) -> None:
        branch = item.branch
        if not item.samples:
            return
        tokens = branch.tokens.tolist()
        assert item.sequence.num_computed_tokens == len(tokens)
        self.check_content(item.sequence, tokens)
        branches = [branch]
        if branch.index == branch.num_output_tokens == 0:
            there = {other.index for other in branch.request.branches}
            missing = set(range(branch.request.params.n)) - there
            branches += [self.scheduler.fork(branch, index) for index in sorted(missing)]
        for each in branches:
            self._append(each, next_token(tokens, each.index))

    def check_content(self, sequence: Sequence, tokens: list[int]) -> None:
        """Every slot that the sequence reads was computed for a beginning of `tokens`."""
        kv = self.kv
        if self.cache.pool.copies:  # left by a step that was interrupted: they run before a read
            kv = FakeKV(dict(kv.slots))
            kv.copy(self.cache.pending_copies)
        for position, content in enumerate(kv.read(sequence)):
            expected = (content_identity(sequence.root), tuple(tokens[: position + 1]))
            assert content == expected, f"{sequence} reads {content} at {position}"

    def _append(self, branch: Branch, token: int) -> None:
        request = branch.request
        branch.append(token)
        if branch.num_output_tokens < request.max_tokens:
            return
        output = branch.tokens[request.num_prompt_tokens :].tolist()
        if branch.index == 0:
            self.finished[request.request_id] = output
        self.siblings[request.request_id, branch.index] = output
        self.scheduler.lease(branch)
        self.scheduler.finish_branch(branch)

    def run(self) -> dict[str, list[int]]:
        """Run until nothing is left to do; outputs by request id."""
        for _ in range(self.max_steps):
            if not self.scheduler.has_work:
                return self.finished
            self.step()
        raise AssertionError(f"{self.scheduler.num_waiting} still wait: no progress")
