"""What happens inside the steps of a real engine: recorded, poisoned, and failing as told."""

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from engine_oracle import (
    Call,
    Draw,
    Fault,
    Row,
    Watched,
    chain_tokens,
    plain_model,
    served_model,
    unreadable,
    wrap,
)

from prefixkv.beam_search import BeamSearch
from prefixkv.block import common_beginning
from prefixkv.config import EngineConfig
from prefixkv.engine import Engine
from prefixkv.hashing import unpack_tokens
from prefixkv.kv_cache import KVCache
from prefixkv.output_stream import OutputStream
from prefixkv.request import Branch
from prefixkv.sampling import Draws, SamplingRow
from prefixkv.scheduler import Batch, ScheduledBranch
from prefixkv.sequence import Sequence as CachedSequence

# where a class makes its objects within a step
PLACES_IN_CLASSES: dict[str, tuple[type, str]] = {
    "Batch.add": (Batch, "add"),
    "push": (OutputStream, "push"),
    "advance": (BeamSearch, "advance"),
}


class _KVCache(KVCache):
    """One whose methods can be replaced."""


class EngineWatch:
    """An engine, wrapped where its steps go.

    Attributes:
        counts: situations met.
        live: requests by id.
        logits: of every step.
        computed: (salt, tokens) whose K and V may be found.
        fault: what is to happen in the step.
        failing: ids of the requests that the step has to fail.
        batch: what the step runs.
    """

    def __init__(
        self, kind: str, counts: Counter[str], dtype: torch.dtype, poison: float,
        config: EngineConfig,
    ) -> None:  # fmt: skip
        self.kind, self.counts, self.dtype, self.poison_value = kind, counts, dtype, poison
        served = served_model(kind, dtype)
        vars(served)["world"] = self
        self.engine = engine = Engine(copy.copy(served), config)
        engine.kv_cache = _KVCache(engine.kv_cache.pool, engine.kv_cache.shape)
        engine.kv_cache.fill(poison)
        self.live: dict[str, Watched] = {}
        self.logits: list[torch.Tensor] = []
        self.generation = 0  # grows whenever everything cached is forgotten
        self.generations: dict[CachedSequence, int] = {}
        self.computed: set[tuple[str | None, bytes]] = set()
        self._begin_step(None)
        self._load_weights(0)
        wrap(engine.scheduler, "schedule", self._around_schedule)
        wrap(engine.scheduler, "_start", self._around_start)
        wrap(engine.scheduler, "fork", self._around_fork)
        wrap(engine.backend, "copy_blocks", self._around_copies)
        wrap(engine.model, "forward", self._around_forward)
        wrap(engine._sampler, "draw", self._around_draw)
        for owner, name in (
            (engine.cache, "match"), (engine.cache, "publish"), (engine.scheduler, "committed"),
            (engine.scheduler, "finish_branch"), (engine.scheduler, "_stop_running"),
            (engine.scheduler, "branch_out"),
        ):  # fmt: skip
            wrap(owner, name, self._around(name))

    def _forget(self) -> None:
        self.generation += 1
        self.computed.clear()

    def _load_weights(self, weights: int) -> None:
        self.weights = weights
        served = vars(served_model(self.kind, self.dtype))
        if served.setdefault("weights", 0) != weights:
            served["weights"] = weights
            state = plain_model(self.kind, weights, self.dtype).state_dict()
            self.engine.model.hf.load_state_dict(state)

    def _check_readable(self) -> None:
        pool = self.engine.kv_cache.pool
        masked = pool.masked_fill(unreadable(self.engine.cache)[:, None, None, None, :, None], 0)
        assert torch.isfinite(masked.sum()), "something that may be read is not finite"

    def poison(self) -> None:
        """Overwrite what nobody may read, K and V of all layers."""
        mask = unreadable(self.engine.cache)[:, None, None, None, :, None]
        self.engine.kv_cache.pool.masked_fill_(mask, self.poison_value)

    def _begin_step(self, fault: Fault | None) -> None:
        self.fault, self.num_calls = fault, 0
        self.struck = self.forwarded = False
        self.failing: set[str] = set()
        self.batch: list[ScheduledBranch] = []
        self.chains: list[tuple[str, bytes]] = []  # of those that may be found again

    def _around_schedule(self, schedule: Call) -> list[ScheduledBranch]:
        cache = self.engine.cache
        evicted, copied = cache.pool.num_evicted, cache.stats.num_copies
        self.batch = schedule()
        self.counts["evictions"] += cache.pool.num_evicted - evicted
        self.counts["copies on write"] += cache.stats.num_copies - copied
        self.counts["steps with twins waiting"] += bool(self.engine.scheduler.twins)
        for item in self.batch:
            request = item.branch.request
            watched = self.live[request.request_id]
            chain = chain_tokens(item.sequence, item.start + item.num_tokens)
            if not request.in_lockstep:
                assert item.branch.tokens.tobytes().startswith(chain)
            if self.generations.setdefault(item.sequence, watched.generation) == self.generation:
                self.chains.append((request.request_id, chain))
        self.poison()
        return self.batch

    def _around_start(self, start: Call, branch: Branch, sequence: CachedSequence) -> None:
        """Nothing may be found that nobody computed with this salt since the cache was emptied."""
        self._strike("_start")
        watched, found = self.live[branch.request.request_id], sequence.num_tokens
        watched.generation = self.generations[sequence] = self.generation
        packed = branch.tokens.tobytes()
        chains = [chain for salt, chain in self.computed if salt == watched.salt]
        longest = max((common_beginning(packed, chain) // 4 for chain in chains), default=0)
        assert found <= longest, f"found {found} tokens, {longest} were computed"
        self.counts["requests with cached tokens"] += found > 0
        self.counts["partial hits"] += found % self.engine.cache.block_size > 0
        start(branch, sequence)

    def _around_fork(self, fork: Call, branch: Branch, index: int) -> Any:
        self._strike("fork")
        assert branch.sequence is not None
        child = fork(branch, index)
        if child.sequence is not None:
            self.generations[child.sequence] = self.generations[branch.sequence]
        return child

    def _around_copies(self, copy_blocks: Call, pool: torch.Tensor, pairs: Sequence[Any]) -> None:
        if pairs and self.fault is not None and self.fault.where == "copies":
            copy_blocks(pool, pairs[: self.fault.which])
            self._strike("copies")
        copy_blocks(pool, pairs)

    def _around_forward(self, forward: Call, *arguments: Any) -> torch.Tensor:
        self.poison()
        self._strike("forward")
        logits: torch.Tensor = forward(*arguments).clone()
        self.forwarded = True
        sampled = [item for item in self.batch if item.samples]
        if self.fault is not None and self.fault.where == "logits" and sampled:
            row = self.fault.which % len(sampled)
            logits[row, self.fault.which] = self.fault.value
            self._note_spoiled(sampled[row])
        self.logits.append(logits.clone())
        for item, found in zip(sampled, logits, strict=True):
            watched = self.live[item.branch.request.request_id]
            if item.branch.request.request_id not in self.failing:
                tokens = unpack_tokens(chain_tokens(item.sequence, item.branch.num_tokens))
                watched.rows.append(Row(tuple(tokens), self.weights, found))
        return logits

    def _around_draw(self, draw: Call, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> Draws:
        self._strike("sampler")
        result: Draws = draw(logits, rows)
        requests = {id(item.branch.tokens): item.branch.request for item in self.batch}
        for row, sampled in zip(rows, result.read(), strict=True):
            request_id = requests[id(row.tokens)].request_id
            if request_id in self.failing:  # drawn all the same, and thrown away
                continue
            watched = self.live[request_id]
            drawn = Draw(row.branch, tuple(row.tokens), self.weights, sampled.token_id)
            watched.draws[row.branch, row.position] = drawn
        return result

    def after_projection(self, layer: int, name: str, output: torch.Tensor) -> torch.Tensor:
        """Called with the keys or values of a layer, [1, num_tokens, sizes]."""
        if (layer, name) == (1, "values"):
            self._strike("layer")
        fault = self.fault
        if fault is None or fault.where != name or fault.which % 2 != layer:
            return output
        row = fault.which // 2 % output.shape[1]
        output = output.clone()
        output[0, row] = fault.value
        for item in self.batch:
            if row < item.num_tokens:
                self._note_spoiled(item)
                break
            row -= item.num_tokens
        return output

    def _note_spoiled(self, item: ScheduledBranch) -> None:
        assert self.fault is not None
        self.failing.add(item.branch.request.request_id)
        chunk = "row that samples" if item.samples else "chunk that samples nothing"
        self.counts[f"{self.fault.where} not finite in a {chunk}"] += 1

    def _around(self, where: str) -> Callable[..., Any]:
        def around(call: Call, *arguments: Any, **named: Any) -> Any:
            self._strike(where)
            return call(*arguments, **named)

        return around

    @contextmanager
    def _planted_in_a_class(self) -> Iterator[None]:
        where = self.fault.where if self.fault is not None else ""
        if where not in PLACES_IN_CLASSES:
            yield
            return
        owner, name = PLACES_IN_CLASSES[where]
        call = getattr(owner, name)

        def struck(self_: Any, *arguments: Any, **named: Any) -> Any:
            self._strike(where, self_.request.request_id if where == "push" else None)
            return call(self_, *arguments, **named)

        with patch.object(owner, name, struck):
            yield

    def _strike(self, where: str, victim: str | None = None) -> None:
        """Raise, if this is where the fault is; its victim is everyone if it is nobody."""
        fault = self.fault
        if fault is None or fault.where != where:
            return
        self.num_calls += 1
        if where != "copies" and self.num_calls != fault.which + 1:
            return
        self.struck = True
        if fault.error is not KeyboardInterrupt:
            everyone = {item.branch.request.request_id for item in self.batch}
            self.failing |= everyone if victim is None else {victim}
        raise fault.error("planted")
