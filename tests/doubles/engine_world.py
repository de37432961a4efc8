"""A real engine under an eye: what it samples must be what the plain model gives, alone, uncached.

When a step has been scheduled, and again before its forward, every slot is overwritten that no
published block and no running sequence may read.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from engine_oracle import NAN, Fault, Watched, oracle_of
from engine_watch import EngineWatch

from prefixkv.block import FREE
from prefixkv.config import EngineConfig
from prefixkv.errors import RequestTooLarge
from prefixkv.outputs import OutputDelta
from prefixkv.request import Request
from prefixkv.sampling_params import SamplingParams


class EngineWorld(EngineWatch):
    """An engine and its requests; call `check` after each operation and `finish` at the end.

    Attributes:
        live: by id, the requests whose end was not told.
        known: (salt, tokens) of every request so far, and of every branch as it ended.
    """

    def __init__(
        self, kind: str, counts: Counter[str], *, dtype: torch.dtype = torch.float64,
        poison: float = NAN, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(kind, counts, dtype, poison, EngineConfig(**options))
        self.known: list[tuple[str | None, list[int]]] = []

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
