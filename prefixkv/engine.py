"""The engine: one step after another, from queued requests to deltas of their outputs.

A step is schedule -> copies -> forward -> sample -> commit. What is published was computed, was
finite, and belongs to the weights of now; a step that fails publishes nothing.
"""

import itertools
import logging
import random
from dataclasses import asdict, replace
from typing import Final, cast

import numpy as np
import torch

from prefixkv.admission import check_token_ids, resolve_max_tokens
from prefixkv.attention_step import StepAttention
from prefixkv.config import EngineConfig
from prefixkv.errors import (
    ConfigError,
    InvalidRequest,
    InvariantViolation,
    ModelError,
)
from prefixkv.hashing import Tokens, pack_tokens
from prefixkv.identity import ModelIdentity
from prefixkv.kernels.backend import AttentionBackend, BackendName, get_backend
from prefixkv.kv_cache import KVCache
from prefixkv.logits_rules import compile_rules
from prefixkv.model import LanguageModel, ModelFacts
from prefixkv.output_stream import OutputStream
from prefixkv.outputs import OutputDelta
from prefixkv.prefix_cache import PrefixCache
from prefixkv.request import Request
from prefixkv.sampling import Sampled, Sampler, SamplingRow
from prefixkv.sampling_params import MAX_SEED, SamplingParams
from prefixkv.scheduler import ScheduledRequest, Scheduler
from prefixkv.sizing import cache_shape, choose_num_blocks, describe
from prefixkv.step_inputs import StepInputs, build_inputs
from prefixkv.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

NOT_FINITE: Final = Sampled(-1)


class Engine:
    """Runs one model over one pool; single-threaded.

    Attributes:
        max_model_len: prompt and output tokens of one request, at most.
        num_steps: steps run so far, failed ones included.
        num_computed_tokens: tokens that went through the model.
    """

    def __init__(self, model: LanguageModel, config: EngineConfig | None = None) -> None:
        config = config or EngineConfig()
        if model.tokenizer is None:
            raise ModelError("the model was wrapped without a tokenizer")
        facts = model.facts
        self.model = model
        self.tokenizer: Tokenizer = model.tokenizer
        self.config = config
        self.backend = choose_backend(facts, config.attention_backend)
        shape = cache_shape(facts, config.block_size)
        num_blocks = choose_num_blocks(shape, config.num_blocks, config.kv_cache_memory_bytes)
        self.kv_cache = KVCache.allocate(shape, num_blocks)
        size_is_ours = config.num_blocks is None and config.kv_cache_memory_bytes is None
        reason = " (a quarter of the free memory)" if size_is_ours else ""
        logger.info("%s%s", describe(shape, num_blocks), reason)
        self.cache = PrefixCache(
            self.kv_cache.num_blocks, config.block_size, enabled=config.enable_prefix_caching
        )
        self.identity = ModelIdentity(
            architecture=type(model.hf).__name__,
            config_digest=facts.config_digest,
            weights_fingerprint=facts.weights_fingerprint,
            kv_dtype=str(facts.dtype),
            block_size=config.block_size,
            layout="block, layer, kv, head, token, dim",
        )
        self.max_model_len = self._settle_length()
        self.scheduler = Scheduler(self.cache, config.scheduler_config())
        self.num_steps = 0
        self.num_computed_tokens = 0
        self._sampler = Sampler()
        self._streams: dict[str, OutputStream] = {}
        self._numbers = itertools.count()
        self._ids = itertools.count()
        self._seeds = random.Random(config.seed)

    @classmethod
    def load(cls, config: EngineConfig, *, progress: bool = False) -> "Engine":
        """Load the model that `config` names, and allocate the pool.

        Raises:
            ModelError: if it cannot be loaded, or not be served right.
            ConfigError: if an option cannot be honoured.
        """
        model = LanguageModel.load(config.model, dtype=config.dtype, progress=progress)
        return cls(model, config)

    def _settle_length(self) -> int:
        context = self.model.facts.max_context
        wanted = self.config.max_model_len
        if wanted is not None:
            if wanted > context:
                raise ConfigError(f"max_model_len is {wanted}, the model's context is {context}")
            return wanted
        return min(context, self._pool_tokens + 1)  # the KV of a last token is never written

    @property
    def _pool_tokens(self) -> int:
        return self.cache.pool.num_usable * self.config.block_size

    # -- requests --------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return self.scheduler.has_work

    def add(
        self,
        prompt: Tokens,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> Request:
        """Queue a request; its deltas come from later steps.

        Args:
            prompt: token ids.
            cache_salt: only requests with the same salt share KV.
            priority: lower goes first.

        Raises:
            InvalidRequest: if the prompt is empty, holds ids out of the vocabulary, or is too long.
            QueueFull: if too many requests wait.
        """
        packed = pack_tokens(prompt)
        facts = self.model.facts
        check_token_ids(packed, facts.vocab_size)
        if params.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs is not supported yet", "prompt_logprobs")
        rules = compile_rules(
            params,
            self.tokenizer,
            eos_token_ids=facts.eos_token_ids,
            vocab_size=facts.vocab_size,
        )
        number = next(self._numbers)
        request = Request(
            request_id if request_id is not None else self._new_id(),
            packed,
            params,
            self._identity_for(cache_salt),
            number=number,
            max_tokens=resolve_max_tokens(
                len(packed) // 4, params.max_tokens, self.max_model_len, self._pool_tokens
            ),
            seed=params.seed if params.seed is not None else self._seeds.randint(0, MAX_SEED),
            priority=priority,
            rules=rules,
        )
        if request.request_id in self._streams:
            raise InvalidRequest(f"request id {request.request_id!r} is in use", "request_id")
        stream = OutputStream(request, self.tokenizer, facts.eos_token_ids)
        self.scheduler.add(request)
        self._streams[request.request_id] = stream
        return request

    def _new_id(self) -> str:
        ids = (f"request-{number}" for number in self._ids)
        return next(request_id for request_id in ids if request_id not in self._streams)

    def abort(self, request_id: str) -> bool:
        """End a request without another delta; False if there is none of that id."""
        stream = self._streams.pop(request_id, None)
        if stream is None:
            return False
        self.scheduler.finish(stream.request)
        return True

    def abort_all(self) -> None:
        """End all requests without another delta."""
        for request_id in list(self._streams):
            self.abort(request_id)

    def _identity_for(self, salt: str | None) -> ModelIdentity:
        return self.identity if salt is None else replace(self.identity, salt=salt)

    # -- a step ----------------------------------------------------------------------------------

    def step(self) -> list[OutputDelta]:
        """Run one step; returns a delta for each request that got a token or ended by it.

        A failing forward ends the requests of the step with an error; nothing of it is published,
        and the engine lives on.
        """
        batch = self.scheduler.schedule()
        if not batch:
            return []
        self.num_steps += 1
        try:
            return self._run(batch)
        except BaseException:  # interrupted: the requests go on with the next step
            self._take_back(batch)
            raise

    def _run(self, batch: list[ScheduledRequest]) -> list[OutputDelta]:
        failure: str | None = None
        try:
            tokens = self._compute(batch)
        except Exception as error:
            logger.exception("a step of %d requests failed", len(batch))
            failure = f"{type(error).__name__}: {error}"
        if failure is not None:  # outside the handler, where no traceback holds on to arrays
            return [self._fail(item.request, failure) for item in batch]
        for item, token in zip(batch, tokens, strict=True):
            if token is not NOT_FINITE:
                self._commit(item)
        deltas = [self._deliver(item, token) for item, token in zip(batch, tokens, strict=True)]
        return [delta for delta in deltas if delta is not None]

    def _take_back(self, batch: list[ScheduledRequest]) -> None:
        """Undo what was scheduled and not computed, or computed without its token being drawn."""
        for request, sequence in ((item.request, item.sequence) for item in batch):
            if request.sequence is sequence:
                sequence.discard()
                if request.num_pending_tokens == 0:
                    sequence.rollback(sequence.num_tokens - 1)

    def _compute(self, batch: list[ScheduledRequest]) -> list[Sampled | None]:
        """Return each request's next token, None if it has not reached it, or NOT_FINITE."""
        inputs = build_inputs(batch, self.cache.block_size, self.model.facts.windows)
        copies = self.cache.pending_copies
        self.kv_cache.copy_blocks(
            [(c.source.block_id, c.target.block_id, c.num_slots) for c in copies]
        )
        self.cache.pool.finish_copies()
        attention = StepAttention(
            self.kv_cache, self.backend, inputs.slots, inputs.plans, self.model.facts.windows
        )
        logits = self.model.forward(
            inputs.token_ids, inputs.positions, attention, inputs.logits_rows
        )
        self.num_computed_tokens += len(inputs.token_ids)
        assert attention.finite_rows is not None
        healthy = _all_by_request(attention.finite_rows, inputs)
        finite_logits = iter(torch.isfinite(logits).all(dim=-1).tolist())
        sampled = [(i, item, next(finite_logits)) for i, item in enumerate(batch) if item.samples]
        for i, _, finite in sampled:
            healthy[i] &= finite
        drawn = [row for row, (i, _, _) in enumerate(sampled) if healthy[i]]
        rows = [self._sampling_row(sampled[row][1].request) for row in drawn]
        tokens: list[Sampled | None] = [None if ok else NOT_FINITE for ok in healthy]
        for row, token in zip(drawn, self._sampler.sample(logits[drawn], rows), strict=True):
            tokens[sampled[row][0]] = token
        return tokens

    @staticmethod
    def _sampling_row(request: Request) -> SamplingRow:
        return SamplingRow(
            request.params,
            request.seed,
            0,
            len(request.tokens),
            rules=request.rules,
            tokens=request.tokens,
            num_prompt_tokens=request.num_prompt_tokens,
        )

    def _commit(self, item: ScheduledRequest) -> None:
        item.sequence.commit()
        item.request.usage.num_computed_tokens += item.num_tokens
        self.scheduler.committed(item.request)

    def _deliver(self, item: ScheduledRequest, token: Sampled | None) -> OutputDelta | None:
        """Give a request its token, and end it if it is over."""
        request = item.request
        if token is None:
            return None
        if token is NOT_FINITE:
            return self._fail(request, "the model computed values that are not finite")
        if token.token_id is None:
            return self._fail(request, "allowed_token_ids, bad_words and min_tokens leave no token")
        request.append(token.token_id)
        try:
            delta = self._streams[request.request_id].push(token.token_id, token.logprobs)
        except Exception as error:
            logger.exception("the output of %s cannot be decoded", request)
            return self._fail(request, f"{type(error).__name__}: {error}")
        if delta.finish_reason is not None:
            self.abort(request.request_id)
        return delta

    def _fail(self, request: Request, error: str) -> OutputDelta:
        delta = self._streams[request.request_id].fail(error)
        self.abort(request.request_id)
        return delta

    # -- the cache -------------------------------------------------------------------------------

    def reset_prefix_cache(self) -> None:
        """Forget all that is cached; running requests go on."""
        self.cache.reset()

    def weights_changed(self) -> None:
        """Say that the weights were replaced in place: no KV of the old ones is used again.

        Running requests go on from the tokens they have, recomputed under the new weights.
        """
        self.cache.weights_changed()
        self.scheduler.preempt_all()

    def stats(self) -> dict[str, int | float]:
        """Counts for monitoring; O(blocks)."""
        pool = self.cache.pool
        return {
            "num_requests_running": len(self.scheduler.running),
            "num_requests_waiting": self.scheduler.num_waiting,
            "num_preemptions": self.scheduler.num_preemptions,
            "num_prompt_tokens": self.scheduler.num_prompt_tokens,
            "num_cached_tokens": self.scheduler.num_cached_tokens,
            "num_steps": self.num_steps,
            "num_computed_tokens": self.num_computed_tokens,
            "num_blocks": pool.num_usable,
            "num_free_blocks": len(pool.free),
            "num_evicted_blocks": pool.num_evicted,
            "kv_cache_usage": self.cache.usage,
            **asdict(self.cache.stats),
        }

    def check_invariants(self) -> None:
        """Check the books of the scheduler and the cache; O(blocks)."""
        self.scheduler.check_invariants()
        requests = {stream.request for stream in self._streams.values()}
        twins = {twin for waiting in self.scheduler.twins.values() for _, twin in waiting}
        queued = twins.union(self.scheduler.running, self.scheduler.waiting)
        if requests != queued:
            raise InvariantViolation(
                f"engine: {len(requests)} outputs are open, {len(queued)} requests are queued"
            )


def choose_backend(facts: ModelFacts, name: str) -> AttentionBackend:
    """Return the attention backend of that name; ConfigError if it cannot serve the model."""
    try:
        backend = get_backend(cast(BackendName, name), facts.dtype)
    except ValueError as error:
        raise ConfigError(f"attention_backend: {error}") from None
    reason = backend.supports(facts.dtype, facts.head_dim, facts.num_heads, facts.num_kv_heads)
    if reason is not None:
        raise ConfigError(f"attention_backend: {reason}")
    return backend


def _all_by_request(rows: torch.Tensor, inputs: StepInputs) -> list[bool]:
    """Whether all rows of each request are true."""
    starts = np.concatenate(([0], inputs.row_ends[:-1]))
    whole: list[bool] = np.logical_and.reduceat(rows.cpu().numpy(), starts).tolist()
    return whole
