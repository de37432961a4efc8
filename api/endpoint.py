"""What completions and chats do alike: from token ids to a body or a stream."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from prefixkv.api.access.tenant import tenant_of
from prefixkv.api.caching.cache_plan import CachePlan
from prefixkv.api.caching.cache_use import cache_controls, cache_reports
from prefixkv.api.caching.prewarm import prewarmed
from prefixkv.api.disconnect import unless_disconnected
from prefixkv.api.engine_interface import Tokenizer
from prefixkv.api.generation import Deltas, collect, first_of, generate
from prefixkv.api.history.answers import noted
from prefixkv.api.replies.bodies import Envelope, json_response, long_json_response
from prefixkv.api.replies.echo import Echo, echoed
from prefixkv.api.replies.logprobs import MANY_LOGPROBS, LogprobsBody, prompt_logprobs_body
from prefixkv.api.replies.streaming import Chunks, EventStream, Told, events
from prefixkv.api.requests.body import read_body
from prefixkv.api.requests.request_headers import priority_of
from prefixkv.api.requests.request_id import request_id_of
from prefixkv.api.requests.schemas import GenerationRequest
from prefixkv.api.service import Service
from prefixkv.api.serving.access_log import USAGES_KEY
from prefixkv.outputs import BranchOutput, Completion
from prefixkv.sampling_params import SamplingParams

# encoding more text than this takes longer than a hop to a thread and back, which costs a few
# milliseconds while the engine's thread holds the interpreter; streams must not wait for it
LONG_BODY_BYTES = 16_384


@dataclass(frozen=True, slots=True)
class Shape:
    """How an endpoint dresses what the engine says.

    `logprobs` makes the encoder of a choice, from the tokenizer and what is told before it.
    `prompt_logprobs` stand in each choice, or once beside them.
    """

    id_prefix: str
    body: Callable[[Envelope, Sequence[Completion], Callable[[int], LogprobsBody]], dict[str, Any]]
    chunks: Callable[[Envelope, Callable[[int], LogprobsBody]], Chunks]
    logprobs: Callable[[Tokenizer, str], LogprobsBody]
    scores_each_choice: bool = True


def _add_prompt_logprobs(
    body: dict[str, Any],
    shape: Shape,
    completions: Sequence[Completion],
    job: "Job",
    tokenizer: Tokenizer,
) -> None:
    """Put them where vLLM has them: in each choice of a completion, or beside those of a chat."""
    num_top = job.request.prompt_logprobs
    if num_top is None:
        return
    told = [
        prompt_logprobs_body(completion.prompt_logprobs or (), num_top, tokenizer)
        for completion in completions
    ]
    if not shape.scores_each_choice:
        body["prompt_logprobs"] = told[0]
        return
    for choice in body["choices"]:
        choice["prompt_logprobs"] = told[choice["index"] // job.params.n]


def num_scored(completion: Completion) -> int:
    """Return how many tokens of a prompt and its outputs have log-probabilities."""
    outputs = sum(len(output.logprobs or ()) for output in completion.outputs)
    return outputs + len(completion.prompt_logprobs or ())


@dataclass(frozen=True, slots=True)
class Job:
    """A request that was checked and tokenised."""

    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    request: GenerationRequest
    model: str
    plans: Sequence[CachePlan]
    echoes: Sequence[Echo] = ()
    is_only_echo: bool = False
    note: Callable[[BranchOutput], object] | None = None
    """Called with each whole answer, before the client sees its end."""


MadeT = TypeVar("MadeT")


async def read_job(
    service: Service,
    http_request: Request,
    make_job: Callable[[Service, bytes], MadeT],
    *,
    beside_the_loop: bytes | None = None,
) -> MadeT:
    """Read the body and make a job of it, or whatever `make_job` makes.

    Args:
        beside_the_loop: what stands in a body that means more work than its length tells.

    Raises:
        InvalidRequest: the body or a field of it is wrong.
        ModelNotFound: it names a model that is not served.
    """
    raw = await read_body(http_request, service.max_body_bytes)
    is_more = beside_the_loop is not None and beside_the_loop in raw
    if len(raw) < LONG_BODY_BYTES and not is_more:
        return make_job(service, raw)
    return await asyncio.to_thread(make_job, service, raw)


async def answer(service: Service, http_request: Request, job: Job, shape: Shape) -> Response:
    """Run `job` and answer it, unless the client leaves before.

    A stream begins with its first delta, so that what the engine refuses still gets its status.

    Raises:
        ClientDisconnect: the client left; the job was aborted.
    """
    request_id = request_id_of(http_request)
    request_id.adopt(job.request.request_id)
    envelope = Envelope(f"{shape.id_prefix}-{request_id.value}", job.model)

    def logprobs(index: int) -> LogprobsBody:
        echo = job.echoes[index // job.params.n].text if job.echoes else ""
        return shape.logprobs(service.engine.tokenizer, echo)

    deltas = _deltas(service, http_request, job, envelope.id)
    reports = cache_reports(service, http_request, job, request_id.value)
    if not job.request.stream:
        work = collect(deltas, len(job.prompts), job.params.n)
        completions = await unless_disconnected(http_request.receive, work)
        http_request.scope[USAGES_KEY] = [completion.usage for completion in completions]
        members = reports.all_members([completion.cache_report for completion in completions])

        def respond(make: Callable[[Any], Response] = json_response) -> Response:
            body = shape.body(envelope, completions, logprobs)
            _add_prompt_logprobs(body, shape, completions, job, service.engine.tokenizer)
            return make(body | members)

        if sum(map(num_scored, completions)) > MANY_LOGPROBS:
            return await asyncio.to_thread(respond, long_json_response)
        return respond()
    first = await unless_disconnected(http_request.receive, first_of(deltas))
    told = Told(
        shape.chunks(envelope, logprobs),
        num_prompts=len(job.prompts),
        n=job.params.n,
        usage_at_finish=not job.request.includes_usage,
        cache_reports=reports,
    )
    http_request.scope[USAGES_KEY] = told.usages
    return EventStream(events(first, deltas, told), deltas)


def _deltas(service: Service, http_request: Request, job: Job, response_id: str) -> Deltas:
    """Return what the engine will say to `job`, echoes included; nothing is noted of a prewarming,
    which is no answer."""
    deltas = generate(
        service.engine,
        job.prompts,
        job.params,
        response_id=response_id,
        salt=tenant_of(http_request).salt_for(job.request.cache_salt),
        priority=priority_of(http_request, job.request),
        cache_controls=cache_controls(service, http_request, job),
    )
    if job.request.is_prewarm:
        return prewarmed(deltas)
    if job.echoes:
        num_top = job.request.num_logprobs
        deltas = echoed(deltas, job.echoes, num_top=num_top, is_all=job.is_only_echo)
    return noted(deltas, job.note) if job.note is not None else deltas
