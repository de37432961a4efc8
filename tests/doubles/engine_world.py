"""A real engine under an eye: what it samples must be what the plain model gives, alone, uncached.

When a step has been scheduled, and again before its forward, every slot is overwritten that no
published block and no running sequence may read.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from engine_oracle import (
    NAN,
    Call,
    Draw,
    Fault,
    Row,
    Watched,
    chain_tokens,
    oracle_of,
    plain_model,
    served_model,
    unreadable,
    wrap,
)

from prefixkv.beam_search import BeamSearch
from prefixkv.block import FREE, common_beginning
from prefixkv.config import EngineConfig
from prefixkv.engine import Engine
from prefixkv.errors import RequestTooLarge
from prefixkv.hashing import unpack_tokens
from prefixkv.kv_cache import KVCache
from prefixkv.output_stream import OutputStream
from prefixkv.outputs import OutputDelta
from prefixkv.request import Branch, Request
from prefixkv.sampling import Sampled, SamplingRow
from prefixkv.sampling_params import SamplingParams
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


class EngineWorld:
    """An engine and its requests; call `check` after each operation and `finish` at the end.

    Attributes:
        counts: situations met.
        live: by id, the requests whose end was not told.
        known: (salt, tokens) of every request so far, and of every branch as it ended.
        logits: of every step.
    """

    def __init__(
        self, kind: str, counts: Counter[str], *, dtype: torch.dtype = torch.float64,
        poison: float = NAN, **options: Any,
    ) -> None:  # fmt: skip
        self.kind, self.counts, self.dtype, self.poison_value = kind, counts, dtype, poison
        served = served_model(kind, dtype)
        vars(served)["world"] = self
        self.engine = engine = Engine(copy.copy(served), EngineConfig(**options))
        engine.kv_cache = _KVCache(engine.kv_cache.pool, engine.kv_cache.shape)
        engine.kv_cache.fill(poison)
        self.live: dict[str, Watched] = {}
        self.known: list[tuple[str | None, list[int]]] = []
        self.logits: list[torch.Tensor] = []
        self.generation = 0  # grows whenever everything cached is forgotten
        self.generations: dict[CachedSequence, int] = {}
        self.computed: set[tuple[str | None, bytes]] = set()
        self._begin_step(None)
        self._load_weights(0)
        wrap(engine.scheduler, "schedule", self._around_schedule)
        wrap(engine.scheduler, "_start", self._around_start)
        wrap(engine.scheduler, "fork", self._around_fork)
        wrap(engine.kv_cache, "copy_blocks", self._around_copies)
        wrap(engine.model, "forward", self._around_forward)
        wrap(engine._sampler, "sample", self._around_sample)
        for owner, name in (
            (engine.cache, "match"), (engine.cache, "publish"), (engine.scheduler, "committed"),
            (engine.scheduler, "finish_branch"), (engine.scheduler, "_stop_running"),
            (engine.scheduler, "branch_out"),
        ):  # fmt: skip
            wrap(owner, name, self._around(name))

    # -- operations ------------------------------------------------------------------------------

    def add(
        self, prompt: Sequence[int], params: SamplingParams, salt: str | None, priority: int
    ) -> None:
        """Queue a request, its prompt cut to what the pool can hold."""
        assert params.max_tokens is not None
        room = self.engine.max_model_len - params.max_tokens
        if params.use_beam_search:
            size, usable = self.engine.cache.block_size, self.engine.cache.pool.num_usable
            each = -(-params.max_tokens // size) + 1  # blocks of a beam behind the prompt
            room = min(room, (usable - params.n * each) * size + size - 1)
        if room < 1:
            return
        try:
            request = self.engine.add(prompt[:room], params, cache_salt=salt, priority=priority)
        except RequestTooLarge:
            assert params.n > self.engine.scheduler.config.max_num_batched_tokens or (
                params.n > self.engine.scheduler.config.max_num_seqs
            )
            return
        self.live[request.request_id] = Watched(request, salt)
        self.known.append((salt, list(prompt[:room])))

    def by_state(self) -> dict[str, list[str]]:
        """Ids of the unfinished requests, by what they are doing."""
        found: dict[str, list[str]] = {}
        for request_id, watched in self.live.items():
            found.setdefault(self.state_of(watched.request), []).append(request_id)
        return found

    def abort(self, request_id: str) -> None:
        """End a request, wherever it is."""
        state = self.state_of(self.live[request_id].request)
        self.counts[f"aborted while {state}"] += 1
        assert self.engine.abort(request_id) == (state != "over")
        self._end(request_id, "aborted")

    def reset(self) -> None:
        """Forget what is cached."""
        self.counts["resets with running requests"] += bool(self.engine.scheduler.running)
        self.engine.reset_prefix_cache()
        self._forget()

    def change_weights(self, weights: int) -> None:
        """Replace the weights in place, perhaps by the same ones, and say so."""
        if self.engine.scheduler.running:
            kind = "other" if weights != self.weights else "same"
            self.counts[f"{kind} weights with running requests"] += 1
        self._load_weights(weights)
        self.engine.weights_changed()
        self._forget()

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

    def step(self, fault: Fault | None = None) -> None:
        """Run a step, in which `fault` happens if the step gets there."""
        self._begin_step(fault)
        deltas: list[OutputDelta] | None = None
        try:
            with self._planted_in_a_class():
                deltas = self.engine.step()
        except KeyboardInterrupt:
            assert self.struck
            for request_id in {item.branch.request.request_id for item in self.batch}:
                self.live[request_id].was_interrupted = True
        self.fault = None
        assert self.batch or deltas or deltas is None, "there is work, and nothing is scheduled"
        if self.struck:
            assert fault is not None
            self.counts[f"{fault.error.__name__} in {fault.where}"] += 1
        if deltas is not None:
            self._hear(deltas)
        for request_id, chain in self.chains if self.forwarded else ():
            if request_id not in self.failing or (fault is not None and fault.where == "push"):
                self.computed.add((self.live[request_id].salt, chain))
        self._check_readable()
        untold = {delta.request_id for delta in self.engine._untold}
        for request_id in self.live.keys() - self.engine._outputs.keys() - untold:
            self._end(request_id, "failed" if request_id in self.failing else "ended")

    def _hear(self, deltas: list[OutputDelta]) -> None:
        failed = {delta.request_id for delta in deltas if delta.error is not None}
        assert failed == self.failing, f"{failed} are told to have failed, {self.failing} have"
        for delta in deltas:
            watched = self.live[delta.request_id]
            if delta.error is None:
                assert delta.index not in watched.over
                watched.told.setdefault(delta.index, []).extend(delta.token_ids)
                watched.over |= {delta.index} if delta.finish_reason is not None else set()
        for request_id, output in self.engine._outputs.items():
            for branch in output.request.branches:
                told = self.live[request_id].told.get(branch.index, [])
                assert told == branch.tokens[output.request.num_prompt_tokens :].tolist()

    def finish(self) -> None:
        """Abort everything: the pool must be as at the start, once all is evicted."""
        self.fault = None
        for request_id in list(self.live):
            self.engine.abort(request_id)
            self._end(request_id, "aborted")
            self.check()
        cache, pool = self.engine.cache, self.engine.cache.pool
        assert not self.engine.has_work
        assert (len(cache.sequences), len(pool.copies), cache.usage) == (0, 0, 0)
        assert pool.reserve(pool.num_usable)
        assert len(pool.free) == pool.num_usable
        assert (len(pool.index), len(pool.roots), len(pool.copies)) == (0, 0, 0)
        assert all(b.state == FREE and not b.refs for b in pool.blocks)
        self.counts["takeovers"] += cache.stats.num_takeovers
        self.counts["blocks deduplicated"] += cache.stats.num_deduplicated
        self.counts["preemptions"] += self.engine.scheduler.num_preemptions

    # -- what must hold --------------------------------------------------------------------------

    def check(self) -> None:
        """The engine's books, and that it forgets no request."""
        self.engine.check_invariants()
        assert self.engine.has_work == bool(self.live)
        untold = {delta.request_id for delta in self.engine._untold}
        assert self.live.keys() == self.engine._outputs.keys() | untold

    def _check_readable(self) -> None:
        pool = self.engine.kv_cache.pool
        masked = pool.masked_fill(unreadable(self.engine.cache)[:, None, None, None, :, None], 0)
        assert torch.isfinite(masked.sum()), "something that may be read is not finite"

    def poison(self) -> None:
        """Overwrite what nobody may read, K and V of all layers."""
        mask = unreadable(self.engine.cache)[:, None, None, None, :, None]
        self.engine.kv_cache.pool.masked_fill_(mask, self.poison_value)

    def _end(self, request_id: str, how: str) -> None:
        watched = self.live.pop(request_id)
        request, usage = watched.request, watched.request.usage
        watched.check_told(whole=how == "ended")
        for index in sorted(watched.told):
            self.known.append((watched.salt, [*watched.prompt, *watched.told[index]]))
        if self.dtype == torch.float64:
            oracle = oracle_of(self.kind)
            watched.compare(oracle)
            self.counts["rows compared"] += len(watched.rows)
            if request.in_lockstep and how == "ended":
                self.counts["beam searches replayed"] += watched.replays(oracle)
        self.counts["forks"] += usage.num_forks
        if request.in_lockstep:
            self.counts[f"beam searches {how}"] += 1
            self.counts["beam searches preempted"] += usage.num_preemptions > 0
            self.counts["beam searches interrupted"] += watched.was_interrupted
        elif how == "ended":
            self.counts["several branches ended"] += request.params.n > 1
            lengths = {len(told) for told in watched.told.values()}
            self.counts["branches ended at different times"] += len(lengths) > 1

    def state_of(self, request: Request) -> str:
        """What a request is doing between two steps."""
        if request.request_id not in self.engine._outputs:
            return "over"
        twins = [b for waiting in self.engine.scheduler.twins.values() for _, b in waiting]
        if any(branch in twins for branch in request.branches):
            return "a twin"
        running = [branch for branch in request.branches if branch.sequence is not None]
        if not running:
            return "preempted" if request.admission is not None else "waiting"
        if not running[0].num_output_tokens or running[0].num_pending_tokens > 1:
            return "in its prompt"
        return "searching" if request.in_lockstep else "decoding"

    # -- what happens inside a step --------------------------------------------------------------

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

    def _around_copies(self, copy_blocks: Call, pairs: Sequence[Any]) -> None:
        if pairs and self.fault is not None and self.fault.where == "copies":
            copy_blocks(pairs[: self.fault.which])
            self._strike("copies")
        copy_blocks(pairs)

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

    def _around_sample(
        self, sample: Call, logits: torch.Tensor, rows: Sequence[SamplingRow]
    ) -> list[Sampled]:
        self._strike("sampler")
        result: list[Sampled] = sample(logits, rows)
        requests = {id(item.branch.tokens): item.branch.request for item in self.batch}
        for row, sampled in zip(rows, result, strict=True):
            watched = self.live[requests[id(row.tokens)].request_id]
            draw = Draw(row.branch, tuple(row.tokens), self.weights, sampled.token_id)
            watched.draws[row.branch, row.position] = draw
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
