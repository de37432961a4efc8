"""The engine: one step after another, from queued requests to deltas of their outputs.

A step is schedule -> copies -> forward -> sample -> commit. What is published was computed, was
finite, and belongs to the weights of now; a step that fails publishes nothing.
"""

import itertools
import logging
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import torch

from prefixkv.admission import (
    check_token_ids,
    pool_tokens_left,
    refuse_beside_beams,
    resolve_max_tokens,
)
from prefixkv.attention_step import StepAttention
from prefixkv.beam_search import BeamSearch
from prefixkv.cache_control import CacheControl
from prefixkv.config import EngineConfig
from prefixkv.device import choose_backend, choose_device, current, device_of
from prefixkv.engine_stats import read_stats
from prefixkv.errors import (
    ConfigError,
    InvalidRequest,
    InvariantViolation,
    ModelError,
)
from prefixkv.hashing import Tokens, pack_tokens
from prefixkv.held_branch import HeldBranch
from prefixkv.identity import ModelIdentity
from prefixkv.kernels.planner import compile_planner
from prefixkv.kv_cache import KVCache
from prefixkv.logits_rules import compile_rules
from prefixkv.model import LanguageModel
from prefixkv.outputs import OutputDelta
from prefixkv.prefix_cache import PrefixCache
from prefixkv.prompt_logprobs import keep
from prefixkv.request import Branch, Request
from prefixkv.request_output import RequestOutput
from prefixkv.sampling import Sampled, Sampler
from prefixkv.sampling_params import MAX_SEED, SamplingParams
from prefixkv.scheduler import ScheduledBranch, Scheduler
from prefixkv.sizing import describe, size_pool
from prefixkv.step_inputs import StepInputs, build_inputs
from prefixkv.step_results import StepResult, read_logits
from prefixkv.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Engine:
    """Runs one model over one pool; single-threaded.

    Attributes:
        device: of the model and the pool.
        max_model_len: prompt and output tokens of one request, at most.
        num_steps: steps run so far, failed ones included.
        num_computed_tokens: tokens that went through the model.
        num_completion_tokens: tokens drawn for requests that are over.
    """

    def __init__(self, model: LanguageModel, config: EngineConfig | None = None) -> None:
        config = config or EngineConfig()
        if model.tokenizer is None:
            raise ModelError("the model was wrapped without a tokenizer")
        facts = model.facts
        self.model = model
        self.tokenizer: Tokenizer = model.tokenizer
        self.config = config
        self.device = device_of(model, config.device)
        self.backend = choose_backend(
            facts,
            config.attention_backend,
            self.device,
            batch_invariant=config.batch_invariant_attention,
        )
        self._plan_options = self.backend.plan_options(
            facts.dtype, facts.head_dim, facts.num_heads, facts.num_kv_heads, config.block_size
        )
        if self._plan_options is not None:
            compile_planner()
        shape, num_blocks, reason = size_pool(model, config, self._plan_options)
        self.kv_cache = KVCache.allocate(shape, num_blocks, self.device)
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
        self.num_completion_tokens = 0
        self._sampler = Sampler()
        self._outputs: dict[str, RequestOutput] = {}
        self._untold: list[OutputDelta] = []  # what an interrupted step has still to tell
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
        device = choose_device(config.device)
        model = LanguageModel.load(
            config.model, dtype=config.dtype, device=device, progress=progress
        )
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
        """Whether any request is unfinished, or has something to tell."""
        return self.scheduler.has_work or bool(self._untold)

    @property
    def num_open_completion_tokens(self) -> int:
        """Tokens drawn so far for requests that are not over; O(requests)."""
        usages = (output.request.usage for output in self._outputs.values())
        return sum(usage.num_completion_tokens for usage in usages)

    def add(
        self,
        prompt: Tokens,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        after: HeldBranch | None = None,
        keep: bool = False,
        cache_control: CacheControl | None = None,
    ) -> Request:
        """Queue a request; its deltas come from later steps.

        Args:
            prompt: token ids; with `after`, those that follow it, perhaps none.
            cache_salt: only requests with the same salt share KV.
            priority: lower goes first.
            after: a held branch to go on from, salt included.
            keep: hold each branch when it ends, in `held` of the request.
            cache_control: prefixes to lease, and what others may find.

        Raises:
            InvalidRequest: if the prompt is empty, holds ids out of the vocabulary, or is too long.
            QueueFull: if too many requests wait.
        """
        packed = pack_tokens(prompt)
        identity = self._identity_for(cache_salt)
        if after is not None:
            after.refuse_if_released()
            if cache_salt is not None and identity != after.identity:
                raise InvalidRequest("cache_salt differs from that of the branch", "cache_salt")
            packed, identity = after.tokens.tobytes() + packed, after.identity
        if keep and params.is_ranked:
            raise InvalidRequest("keep cannot be combined with best_of or beams", "keep")
        facts = self.model.facts
        check_token_ids(packed, facts.vocab_size)
        if params.use_beam_search:
            refuse_beside_beams(params, facts.vocab_size)
        rules = compile_rules(
            params,
            self.tokenizer,
            eos_token_ids=facts.eos_token_ids,
            vocab_size=facts.vocab_size,
        )
        request = Request(
            request_id if request_id is not None else self._new_id(),
            packed,
            params,
            identity,
            number=next(self._numbers),
            max_tokens=self._max_tokens(params, len(packed) // 4),
            seed=params.seed if params.seed is not None else self._seeds.randint(0, MAX_SEED),
            priority=priority,
            rules=rules,
            origin=after,
            keeps=keep,
            cache_control=cache_control,
        )
        if request.request_id in self._outputs:
            raise InvalidRequest(f"request id {request.request_id!r} is in use", "request_id")
        output = RequestOutput(request, self.tokenizer, facts.eos_token_ids)
        if params.use_beam_search:
            output.begin_search()  # refuses a length_penalty that is too large for max_tokens
        self.scheduler.add(request)
        self._outputs[request.request_id] = output
        return request

    def _max_tokens(self, params: SamplingParams, num_prompt_tokens: int) -> int:
        pool_left = pool_tokens_left(
            params,
            num_prompt_tokens,
            num_blocks=self.cache.pool.num_usable,
            block_size=self.config.block_size,
        )
        return resolve_max_tokens(
            num_prompt_tokens, params.max_tokens, self.max_model_len, pool_left
        )

    def _new_id(self) -> str:
        ids = (f"request-{number}" for number in self._ids)
        return next(request_id for request_id in ids if request_id not in self._outputs)

    def abort(self, request_id: str) -> bool:
        """End a request without another delta; False if there is none of that id."""
        self._untold = [delta for delta in self._untold if delta.request_id != request_id]
        return self._end(request_id)

    def _end(self, request_id: str) -> bool:
        output = self._outputs.get(request_id)
        if output is None:
            return False
        self.scheduler.finish(output.request)
        del self._outputs[request_id]  # not before: an interrupted end can be run again
        self.num_completion_tokens += output.request.usage.num_completion_tokens
        return True

    def fork(self, source: Request | HeldBranch, index: int = 0) -> HeldBranch:
        """Hold what a branch has so far, to go on from it with `add(..., after=...)`.

        Shares every block and copies nothing. A request that runs goes on by itself.

        Args:
            source: a held branch, or a request: one that runs, or was added with `keep`.
            index: of the branch in the request.

        Raises:
            InvalidRequest: if it has no such branch, was released, or is a beam search.
        """
        if isinstance(source, HeldBranch):
            return source.fork()
        if index in source.held:
            return source.held[index].fork()
        if source.in_lockstep:
            raise InvalidRequest("beams cannot be forked; they have no fixed past", "source")
        for branch in source.branches if source.request_id in self._outputs else []:
            if branch.index == index:
                return self.scheduler.hold(branch)
        raise InvalidRequest(f"{source} neither runs nor keeps branch {index}", "index")

    def abort_all(self) -> None:
        """End all requests without another delta."""
        for request_id in list(self._outputs):
            self.abort(request_id)

    def _identity_for(self, salt: str | None) -> ModelIdentity:
        return self.identity if salt is None else replace(self.identity, salt=salt)

    # -- a step ----------------------------------------------------------------------------------

    def step(self) -> list[OutputDelta]:
        """Run one step; returns a delta for each request that got a token or ended by it.

        A failing forward ends the requests of the step with an error; nothing of it is published,
        and the engine lives on.
        """
        try:
            batch = self.scheduler.schedule()
        except BaseException:  # interrupted: who holds what is half done
            self.scheduler.recover(self._branches())
            raise
        if batch:
            self.num_steps += 1
            try:
                self._run(batch)
            except BaseException:  # interrupted: the requests go on with the next step
                self._take_back(batch)
                raise
        deltas, self._untold = self._untold, []
        return deltas

    def _branches(self) -> list[Branch]:
        """All branches that are not over."""
        return [branch for output in self._outputs.values() for branch in output.request.branches]

    def _run(self, batch: list[ScheduledBranch]) -> None:
        """Compute, commit and deliver; what is to be told is added to `_untold`."""
        failure: str | None = None
        try:
            with current(self.device):
                results = self._compute(batch)
        except Exception as error:
            logger.exception("a step of %d branches failed", len(batch))
            failure = f"{type(error).__name__}: {error}"
        if failure is not None:  # outside the handler, where no traceback holds on to arrays
            self._fail_all({item.branch.request: failure for item in batch})
            return
        sick = {
            item.branch.request: "the model computed values that are not finite"
            for item, result in zip(batch, results, strict=True)
            if not result.is_finite
        }
        well = [
            (item, result)
            for item, result in zip(batch, results, strict=True)
            if item.branch.request not in sick
        ]
        for item, result in well:
            self._commit(item, result)
        self._fail_all(sick)
        for item, result in well:
            self._deliver(item.branch, result)
        self._advance_searches(well)

    def _take_back(self, batch: list[ScheduledBranch]) -> None:
        """Undo what was scheduled and not computed, or computed without its token being drawn."""
        self.scheduler.leases.recover()  # what is over below is granted leases again
        for branch, sequence in ((item.branch, item.sequence) for item in batch):
            if branch.sequence is not sequence:
                continue
            if branch.request.in_lockstep:  # who goes on from whom may be half done
                if self._outputs[branch.request.request_id].closing is None:
                    self.scheduler.restart(branch.request)
                continue
            sequence.discard()
            if branch.num_pending_tokens == 0:
                sequence.rollback(sequence.num_tokens - 1)
        for branch in self._branches():
            if branch.index and not branch.num_output_tokens:  # it is forked again
                self.scheduler.finish_branch(branch)
        for output in list(self._outputs.values()):
            self._end_what_is_over(output)
        self.scheduler.release_unowned()

    def _compute(self, batch: list[ScheduledBranch]) -> list[StepResult]:
        """Run the copies and the model; changes no books."""
        inputs = build_inputs(
            batch, self.cache.block_size, self.model.facts.windows, self._plan_options
        )
        pool, windows = self.kv_cache.pool, self.model.facts.windows
        copies = self.cache.pending_copies
        self.backend.copy_blocks(
            pool, [(c.source.block_id, c.target.block_id, c.num_slots) for c in copies]
        )
        self.cache.pool.finish_copies()
        token_ids, positions, slots, logits_rows = self.backend.upload(
            pool,
            self.model.facts.num_heads,
            list(inputs.plans.values()),
            (inputs.token_ids, inputs.positions, inputs.slots, inputs.logits_rows),
        )
        attention = StepAttention(self.kv_cache, self.backend, slots, inputs.plans, windows)
        logits = self.model.forward(token_ids, positions, attention, logits_rows)
        self.num_computed_tokens += len(token_ids)

        def find_healthy() -> list[bool]:
            return _all_by_branch(attention.find_finite_rows(), inputs)

        return read_logits(batch, find_healthy, logits, self._sampler, self._missing_branches)

    def _commit(self, item: ScheduledBranch, result: StepResult) -> None:
        request, sequence = item.branch.request, item.sequence
        known = request.prompt_logprobs
        known += result.prompt_logprobs
        sequence.commit()
        if request.keeps_prompt_logprobs and item.start < request.num_prompt_tokens:
            keep(sequence, item.start, request.prompt, known, request.num_top_prompt_logprobs)
        request.usage.num_computed_tokens += item.num_tokens
        self.scheduler.committed(item.branch)

    def _deliver(self, branch: Branch, result: StepResult) -> None:
        """Give a branch its token; fork the others of its request first, where the prompt ends."""
        if not result.sampled:
            return
        # the first one last: until it has its token, an interrupted step can be run again
        missing = self._missing_branches(branch)
        branches = [*(self.scheduler.fork(branch, index) for index in missing), branch]
        for each, sampled in zip(branches, result.sampled, strict=True):
            if each.request.request_id in self._outputs:  # a sibling may have failed just now
                self._append(each, sampled)

    def _append(self, branch: Branch, sampled: Sampled) -> None:
        """Give a branch its token, and end it if it is over."""
        request = branch.request
        if sampled.token_id is None:
            self._fail_all({request: "allowed_token_ids, bad_words and min_tokens leave no token"})
            return
        output = self._outputs[request.request_id]
        branch.append(sampled.token_id)
        request.usage.num_completion_tokens += 1
        try:
            self._untold += output.push(branch, sampled.token_id, sampled.logprobs)
        except Exception as error:
            logger.exception("the output of %s cannot be decoded", branch)
            self._fail_all({request: f"{type(error).__name__}: {error}"})
            return
        except BaseException:  # interrupted: the token is drawn again
            branch.tokens.pop()
            request.usage.num_completion_tokens -= 1
            raise
        self._end_what_is_over(output)

    def _end_what_is_over(self, output: RequestOutput) -> None:
        """End the branches that have got their last token, and their request with the last one."""
        request = output.request
        for branch in list(request.branches):
            if output.closing is not None or branch.index in output.over:
                if request.keeps and output.closing is None and branch.index not in request.held:
                    request.held[branch.index] = self.scheduler.hold(branch)
                if not output.has_failed:
                    self.scheduler.lease(branch)
                self.scheduler.finish_branch(branch)
        if not request.branches:
            if output.closing is None and request.params.is_ranked:
                output.closing = output.ranked_samples()
            self._untold += output.closing or []
            self._report(request)
            self._end(request.request_id)

    def _report(self, request: Request) -> None:
        """Tell what the cache did with the last delta of a request."""
        for place in reversed(range(len(self._untold))):
            delta = self._untold[place]
            if delta.request_id == request.request_id:
                self._untold[place] = replace(delta, cache_report=request.cache_report)
                return

    def _missing_branches(self, branch: Branch) -> list[int]:
        """Indices of the branches to be forked from this one, whose prompt is computed just now."""
        request = branch.request
        if branch.index or branch.num_output_tokens:
            return []
        begun = self._outputs[request.request_id].begun
        return [i for i in range(1, request.params.num_branches) if i not in begun]

    def _advance_searches(self, results: list[tuple[ScheduledBranch, StepResult]]) -> None:
        """Let each beam search choose who goes on, from the logits of all its beams."""
        rows: dict[Request, list[torch.Tensor]] = {}
        for item, result in results:
            if result.row is not None:
                rows.setdefault(item.branch.request, []).append(result.row)
        for request, logits in rows.items():
            output = self._outputs[request.request_id]
            search = output.search
            if search is None or request.branches[0].num_output_tokens == 0:
                search = output.begin_search()
            scores = torch.stack(logits)
            scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
            goes_on = search.advance(scores.log_softmax(dim=-1))
            if search.is_done:
                self._close_search(output, search)
            else:
                self.scheduler.branch_out(request, goes_on)

    def _close_search(self, output: RequestOutput, search: BeamSearch) -> None:
        """Tell what a search has found, and end its request."""
        try:
            output.closing = output.beams(search.hypotheses())
        except Exception as error:
            logger.exception("the output of %s cannot be decoded", output.request)
            self._fail_all({output.request: f"{type(error).__name__}: {error}"})
        else:
            self._end_what_is_over(output)

    def _fail_all(self, errors: dict[Request, str]) -> None:
        """End requests with an error each."""
        for request, error in errors.items():
            output = self._outputs[request.request_id]
            output.closing = [output.fail(error)]
            self._end_what_is_over(output)

    # -- the cache -------------------------------------------------------------------------------

    def reset_prefix_cache(self) -> None:
        """Forget all that is cached, held or leased; running requests go on."""
        self.scheduler.release_pins()
        self.cache.reset()

    def weights_changed(self) -> None:
        """Say that the weights were replaced in place: no KV of the old ones is used again.

        Running requests go on from the tokens they have, recomputed under the new weights.
        """
        self.scheduler.release_pins()
        self.cache.weights_changed()
        self.scheduler.preempt_all()
        for output in self._outputs.values():
            if output.begun:  # it tells the values that it has begun with
                output.request.keeps_prompt_logprobs = False
            else:
                output.request.forget_prompt_logprobs()

    def stats(self) -> dict[str, int | float]:
        """Counts for monitoring, as `EngineStats` names them; O(blocks)."""
        return read_stats(self).numbers()

    def check_invariants(self) -> None:
        """Check the books of the scheduler and the cache; O(blocks)."""
        self.scheduler.check_invariants()
        branches = self._branches()
        twins = [twin for waiting in self.scheduler.twins.values() for _, twin in waiting]
        queued = [*twins, *self.scheduler.running, *self.scheduler.waiting]
        if Counter(branches) != Counter(queued):
            raise InvariantViolation(
                f"engine: {len(branches)} branches are open, {len(queued)} are queued"
            )


def _all_by_branch(rows: torch.Tensor, inputs: StepInputs) -> list[bool]:
    """Whether all rows of each branch are true."""
    starts = np.concatenate(([0], inputs.row_ends[:-1]))
    whole: list[bool] = np.logical_and.reduceat(rows.cpu().numpy(), starts).tolist()
    return whole
