"""A real engine under an eye: what it samples must be what the plain model gives, alone, uncached.

When a step has been scheduled, and again before its forward, every slot is overwritten that no
published block and no running sequence may read. One full forward of the plain model of
transformers over a request's tokens is the reference of all its rows.
"""

import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as hf
from tiny_models import byte_tokenizer

from prefixkv.block import FREE, TAIL, common_beginning
from prefixkv.config import EngineConfig
from prefixkv.engine import Engine
from prefixkv.kv_cache import KVCache
from prefixkv.model import LanguageModel
from prefixkv.prefix_cache import PrefixCache
from prefixkv.request import Request
from prefixkv.sampling import Sampler, SamplingRow
from prefixkv.sampling_params import SamplingParams
from prefixkv.scheduler import ScheduledRequest

Call = Callable[..., Any]
KINDS = ("llama", "mistral")
NAN = float("nan")
TOLERANCE = 1e-9
SIZES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "vocab_size": 8,
    "eos_token_id": 2, "bos_token_id": 0,
}  # fmt: skip


@contextmanager
def one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from threads of torch, and lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def plain_model(kind: str, weights: int, dtype: torch.dtype = torch.float64) -> Any:
    """A random model of transformers, untouched; "mistral" has a sliding window of 5."""
    sliding = kind == "mistral"
    config = hf.MistralConfig(**SIZES, sliding_window=5) if sliding else hf.LlamaConfig(**SIZES)
    torch.manual_seed(weights)
    build: Any = hf.AutoModelForCausalLM  # untyped
    model = build.from_config(config, attn_implementation="sdpa").to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.4)  # so that attention is not uniform
    return model


@functools.cache
def served_model(kind: str, dtype: torch.dtype) -> LanguageModel:
    """The model that all engines of a kind run, one after the other; `world` watches it."""
    plain = copy.deepcopy(plain_model(kind, 0, dtype))
    model = LanguageModel.from_transformers(plain, byte_tokenizer())

    def watch(layer: int, name: str, module: Any) -> None:
        module.register_forward_hook(
            lambda _, __, output: vars(model)["world"].after_projection(layer, name, output)
        )

    for layer, module in enumerate(plain.model.layers):
        watch(layer, "keys", module.self_attn.k_proj)
        watch(layer, "values", module.self_attn.v_proj)
    return model


class Oracle:
    """Logits of a request that runs alone and without a cache; computed once."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._rows: dict[tuple[int, tuple[int, ...]], torch.Tensor] = {}

    def row(self, weights: int, tokens: tuple[int, ...]) -> torch.Tensor:
        """Logits after the last of `tokens`; finds those of all its beginnings on the way."""
        if (weights, tokens) not in self._rows:
            with torch.inference_mode():
                model = plain_model(self._kind, weights)
                logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
            for end in range(1, len(tokens) + 1):
                self._rows[weights, tokens[:end]] = logits[end - 1]
        return self._rows[weights, tokens]


oracle_of = functools.cache(Oracle)


@dataclass(frozen=True)
class Fault:
    """What goes wrong in a step: an error at the `which`-th call of a place, or a spoiled row."""

    where: str
    which: int = 0
    error: type[BaseException] = RuntimeError
    value: float = NAN


@dataclass(frozen=True)
class Row:
    """What a step gave for the token after the first `num_tokens` of a branch."""

    branch: int
    num_tokens: int
    weights: int
    logits: torch.Tensor


@dataclass(eq=False)
class Watched:
    """A request and what came of it. It has one branch, 0, as long as the engine has no others."""

    request: Request
    salt: str | None
    rows: list[Row] = field(default_factory=list)
    delta_ids: list[int] = field(default_factory=list)
    sequence: Any = None
    generation: int = -1
    was_interrupted: bool = False

    def tokens(self, branch: int) -> tuple[int, ...]:
        """All tokens of a branch."""
        assert branch == 0
        return tuple(self.request.tokens)


class _KVCache(KVCache):
    """One whose methods can be replaced."""


class EngineWorld:
    """An engine and its requests; call `check` after each operation and `finish` at the end.

    Attributes:
        counts: situations met.
        live: unfinished requests by id.
        known: (salt, tokens) of every request so far, as they ended.
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
        self.batch: list[ScheduledRequest] = []
        self.generation = 0  # grows whenever everything cached is forgotten
        self.computed: set[tuple[str | None, bytes]] = set()
        self._begin_step(None)
        self._load_weights(0)
        self._wrap_engine()

    def _wrap_engine(self) -> None:
        engine = self.engine
        wrap(engine.scheduler, "schedule", self._around_schedule)
        wrap(engine.kv_cache, "copy_blocks", self._around_copies)
        wrap(engine.model, "forward", self._around_forward)
        wrap(engine._sampler, "sample", self._around("sampler"))
        wrap(engine.scheduler, "committed", self._around("commit"))
        wrap(engine.cache, "publish", self._around("publish"))

    # -- operations ------------------------------------------------------------------------------

    def add(
        self, prompt: Sequence[int], params: SamplingParams, salt: str | None, priority: int
    ) -> None:
        """Queue a request, its prompt cut to what the pool can hold."""
        assert params.max_tokens is not None
        room = self.engine.max_model_len - params.max_tokens
        if room < 1:
            return
        request = self.engine.add(prompt[:room], params, cache_salt=salt, priority=priority)
        key = request.request_id
        wrap(self.engine._streams[key], "push", self._around("push", key))
        self.live[key] = Watched(request, salt)
        self.known.append((salt, list(prompt[:room])))

    def by_state(self) -> dict[str, list[str]]:
        """Ids of the unfinished requests, by what they are doing."""
        found: dict[str, list[str]] = {}
        for request_id, watched in self.live.items():
            found.setdefault(self.state_of(watched.request), []).append(request_id)
        return found

    def abort(self, request_id: str) -> None:
        """End a request, wherever it is."""
        self.counts[f"aborted while {self.state_of(self.live[request_id].request)}"] += 1
        assert self.engine.abort(request_id)
        self._end(request_id)

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
        try:
            deltas = self.engine.step()
        except KeyboardInterrupt:
            assert self.struck
            deltas = []
            for item in self.batch:
                self.live[item.request.request_id].was_interrupted = True
        assert self.batch, "there is work, and nothing is scheduled"
        if self.struck:
            assert fault is not None
            self.counts[f"{fault.error.__name__} in {fault.where}"] += 1
        for delta in deltas:
            assert (delta.error is not None) == (delta.request_id in self.failing), delta.error
            self.live[delta.request_id].delta_ids.extend(delta.token_ids)
        told = {delta.request_id for delta in deltas}
        assert self.failing <= told, f"{self.failing - told} failed and were not told"
        self._note_computed()
        self._check_readable()
        for request_id in [key for key in self.live if key not in self.engine._streams]:
            self._end(request_id)

    def finish(self) -> None:
        """Abort everything: the pool must be as at the start, once all is evicted."""
        for request_id in list(self.live):
            assert self.engine.abort(request_id)
            self._end(request_id)
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
        assert set(self.live) == set(self.engine._streams)

    def _check_readable(self) -> None:
        pool = self.engine.kv_cache.pool
        masked = pool.masked_fill(unreadable(self.engine.cache)[:, None, None, None, :, None], 0)
        assert torch.isfinite(masked.sum()), "something that may be read is not finite"

    # -- what happens inside a step --------------------------------------------------------------

    def _begin_step(self, fault: Fault | None) -> None:
        self.fault, self.num_calls = fault, 0
        self.struck = self.forwarded = False
        self.failing: set[str] = set()
        self.batch = []

    def _around_schedule(self, schedule: Call) -> list[ScheduledRequest]:
        cache = self.engine.cache
        evicted, copied = cache.pool.num_evicted, cache.stats.num_copies
        self.batch = schedule()
        self.counts["evictions"] += cache.pool.num_evicted - evicted
        self.counts["copies on write"] += cache.stats.num_copies - copied
        self.counts["steps with twins waiting"] += bool(self.engine.scheduler.twins)
        for item in self.batch:
            watched = self.live[item.request.request_id]
            if item.sequence is not watched.sequence:
                self._admit(watched, item)
        self.poison()
        return self.batch

    def _admit(self, watched: Watched, item: ScheduledRequest) -> None:
        """Nothing may be found that nobody computed with this salt since the cache was emptied."""
        watched.sequence, watched.generation = item.sequence, self.generation
        packed = item.request.tokens.tobytes()
        chains = [chain for salt, chain in self.computed if salt == watched.salt]
        longest = max((common_beginning(packed, chain) // 4 for chain in chains), default=0)
        assert item.start <= longest, f"found {item.start} tokens, {longest} were computed"
        self.counts["requests with cached tokens"] += item.start > 0
        self.counts["partial hits"] += item.start % self.engine.cache.block_size > 0

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
            if item.request.request_id not in self.failing:
                row_of = Row(0, item.start + item.num_tokens, self.weights, found)
                self.live[item.request.request_id].rows.append(row_of)
        return logits

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

    def _note_spoiled(self, item: ScheduledRequest) -> None:
        assert self.fault is not None
        self.failing.add(item.request.request_id)
        chunk = "row that samples" if item.samples else "chunk that samples nothing"
        self.counts[f"{self.fault.where} not finite in a {chunk}"] += 1

    def _around(self, where: str, victim: str | None = None) -> Callable[..., Any]:
        def around(call: Call, *arguments: Any) -> Any:
            self._strike(where, victim)
            return call(*arguments)

        return around

    def _strike(self, where: str, victim: str | None = None) -> None:
        """Raise, if this is where the fault is; its victim is everyone if it is nobody."""
        fault = self.fault
        if fault is None or fault.where != where:
            return
        self.num_calls += 1
        if where in ("commit", "publish", "push") and self.num_calls != fault.which + 1:
            return
        self.struck = True
        if fault.error is not KeyboardInterrupt:
            everyone = {item.request.request_id for item in self.batch}
            self.failing |= everyone if victim is None else {victim}
        raise fault.error("planted")

    def poison(self) -> None:
        """Overwrite what nobody may read, K and V of all layers."""
        mask = unreadable(self.engine.cache)[:, None, None, None, :, None]
        self.engine.kv_cache.pool.masked_fill_(mask, self.poison_value)

    # -- ends ------------------------------------------------------------------------------------

    @property
    def _fails_to_push(self) -> bool:
        """Whether what failed was the text alone: its K and V are as good as any."""
        return self.fault is not None and self.fault.where == "push"

    def _note_computed(self) -> None:
        for item in self.batch if self.forwarded else ():
            watched = self.live[item.request.request_id]
            failed = item.request.request_id in self.failing and not self._fails_to_push
            if not failed and watched.generation == self.generation:
                chain = item.request.tokens[: item.start + item.num_tokens].tobytes()
                self.computed.add((watched.salt, chain))

    def _end(self, request_id: str) -> None:
        watched = self.live.pop(request_id)
        request = watched.request
        output = request.tokens[request.num_prompt_tokens :].tolist()
        self.known.append((watched.salt, request.tokens.tolist()))
        assert len(output) <= request.max_tokens
        self.counts["requests that got all their tokens"] += len(output) == request.max_tokens
        if not watched.was_interrupted:  # else deltas are lost, though no tokens
            lost = 1 if request_id in self.failing and self.struck else 0
            assert watched.delta_ids in (output, output[: len(output) - lost])
        if self.dtype == torch.float64:
            self._compare(watched)

    def _compare(self, watched: Watched) -> None:
        """All rows with the oracle, then the tokens that were drawn from them."""
        request, oracle = watched.request, oracle_of(self.kind)
        last = {(row.branch, row.num_tokens): row for row in watched.rows}  # interrupted: twice
        for row in sorted(watched.rows, key=lambda row: -row.num_tokens):
            tokens = watched.tokens(row.branch)
            expected = oracle.row(row.weights, tokens[: row.num_tokens])
            error = float((row.logits - expected).abs().max())
            assert error <= TOLERANCE, f"{error} off at {row.num_tokens} of {tokens}"
            if row is last[row.branch, row.num_tokens] and row.num_tokens < len(tokens):
                draw = SamplingRow(request.params, request.seed, row.branch, row.num_tokens)
                assert Sampler().sample(expected[None], [draw]) == [tokens[row.num_tokens]]
        self.counts["rows compared"] += len(watched.rows)

    def state_of(self, request: Request) -> str:
        """What a request is doing between two steps."""
        scheduler = self.engine.scheduler
        if any(request is twin for waiting in scheduler.twins.values() for _, twin in waiting):
            return "a twin"
        if request.sequence is None:
            return "preempted" if request.admission is not None else "waiting"
        decodes = request.num_output_tokens and request.num_pending_tokens == 1
        return "decoding" if decodes else "in its prompt"


def wrap(owner: object, name: str, around: Callable[..., Any]) -> None:
    """Call `around(method, *arguments)` instead of a method of one object."""
    method = getattr(owner, name)
    setattr(owner, name, lambda *arguments: around(method, *arguments))


def unreadable(cache: PrefixCache) -> torch.Tensor:
    """[num_blocks, block_size]: slots that no published block holds and no sequence computed."""
    size, copies = cache.block_size, cache.pool.copies
    held = {b: len(b.tokens) // 4 for b in cache.pool.blocks if b.state >= TAIL}
    for item in copies.values():
        held[item.source] = max(held.get(item.source, 0), item.num_slots)
    for sequence in cache.sequences:
        block = sequence.last_block
        while block.parent is not None:
            own = min(sequence.num_computed_tokens - (block.depth - 1) * size, size)
            held[block] = max(held.get(block, 0), own)
            block = block.parent
    held.update(dict.fromkeys(copies, 0))  # what is copied there first makes it readable
    ends = [held.get(block, 0) for block in cache.pool.blocks]
    return torch.tensor([[slot >= end for slot in range(size)] for end in ends])
