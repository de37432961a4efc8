"""Runs a scheduler's steps over the fake KV, with a model that is a function of the tokens."""

from collections.abc import Callable, Collection, Sequence
from typing import Literal

from fake_kv import FakeKV, content_identity

from prefixkv.config import SchedulerConfig
from prefixkv.hashing import DigestFunction, chain_digest
from prefixkv.identity import ModelIdentity
from prefixkv.prefix_cache import PrefixCache
from prefixkv.request import Request
from prefixkv.sampling_params import SamplingParams
from prefixkv.scheduler import ScheduledRequest, Scheduler

IDENTITY = ModelIdentity(architecture="fake")
VOCAB_SIZE = 3

Fault = Literal["copies", "forward", "interrupt"]


def next_token(tokens: Sequence[int]) -> int:
    """The fake model: a token that depends on all before it."""
    state = 7
    for token in tokens:
        state = (state * 31 + token + 1) % 1_000_003
    return state % VOCAB_SIZE


def serial_output(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What a request gives when it runs alone without a cache."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
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
        **limits: int | None,
    ) -> None:
        self.cache = PrefixCache(num_blocks + 1, block_size, enabled=enabled, digest=digest)
        config = SchedulerConfig(**limits)  # type: ignore[arg-type]
        self.scheduler = Scheduler(self.cache, config)
        self.kv = FakeKV()
        self.finished: dict[str, list[int]] = {}
        self.num_computed = 0
        self.num_requests = 0
        self.max_steps = 10_000
        self.on_batch: Callable[[list[ScheduledRequest]], None] = lambda batch: None

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        identity: ModelIdentity = IDENTITY,
        priority: int = 0,
    ) -> Request:
        """Queue a request."""
        request = Request(
            str(self.num_requests), list(prompt), SamplingParams(max_tokens=max_tokens), identity,
            number=self.num_requests, max_tokens=max_tokens, priority=priority,
        )  # fmt: skip
        self.num_requests += 1
        self.scheduler.add(request)
        return request

    def step(
        self, fault: Fault | None = None, *, not_finite: Collection[Request] = ()
    ) -> list[ScheduledRequest]:
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
            bad = [i for i in batch if fault is not None or i.request in not_finite]
            for item in batch:
                if item not in bad:
                    self._commit(item)
            for item in batch:
                if item in bad:
                    self.scheduler.finish(item.request)
                else:
                    self._advance(item)
        self.scheduler.check_invariants()
        self.kv.poison_free(self.cache)
        return batch

    def _compute(
        self, batch: list[ScheduledRequest], fault: Fault | None, not_finite: Collection[Request]
    ) -> None:
        if fault == "copies":
            return
        self.kv.copy(self.cache.pending_copies)
        self.cache.pool.finish_copies()
        for item in batch:
            failed = fault is not None or item.request in not_finite
            self.kv.write(item.sequence, item.request.tokens.tolist(), failed=failed)

    @staticmethod
    def _take_back(batch: list[ScheduledRequest]) -> None:
        for item in batch:
            item.sequence.discard()

    def _commit(self, item: ScheduledRequest) -> None:
        item.sequence.commit()
        self.num_computed += item.num_tokens
        item.request.usage.num_computed_tokens += item.num_tokens
        self.scheduler.committed(item.request)

    def _advance(self, item: ScheduledRequest) -> None:
        request = item.request
        if not item.samples:
            return
        tokens = request.tokens.tolist()
        assert item.sequence.num_computed_tokens == len(tokens)
        for position, content in enumerate(self.kv.read(item.sequence)):
            expected = (content_identity(item.sequence.root), tuple(tokens[: position + 1]))
            assert content == expected, f"{request} reads {content} at {position}"
        request.append(next_token(tokens))
        if request.num_output_tokens == request.max_tokens:
            self.finished[request.request_id] = request.tokens[request.num_prompt_tokens :].tolist()
            self.scheduler.finish(request)

    def run(self) -> dict[str, list[int]]:
        """Run until nothing is left to do; outputs by request id."""
        for _ in range(self.max_steps):
            if not self.scheduler.has_work:
                return self.finished
            self.step()
        raise AssertionError(f"{self.scheduler.num_waiting} still wait: no progress")
