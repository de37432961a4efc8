"""POST /v1/responses, and what was answered there: GET, DELETE, cancel."""

import re
import uuid
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from prefixkv.api.access.tenant import Tenant, tenant_of
from prefixkv.api.caching.cache_reports import CacheReports
from prefixkv.api.caching.cache_use import cache_controls, cache_reports
from prefixkv.api.caching.prewarm import prewarmed
from prefixkv.api.conversations.response_events import ResponseEvents, response_events
from prefixkv.api.conversations.response_items import input_items
from prefixkv.api.conversations.response_job import ResponseJob, response_job
from prefixkv.api.conversations.response_objects import ResponseObject, Status, response_logprobs
from prefixkv.api.conversations.response_store import StoredResponse
from prefixkv.api.disconnect import unless_disconnected
from prefixkv.api.endpoint import read_job
from prefixkv.api.errors import UnsupportedField
from prefixkv.api.generation import collect, first_of, generate
from prefixkv.api.history.told_tokens import told_tokens
from prefixkv.api.replies.bodies import dump_json, json_response
from prefixkv.api.replies.logprobs import ChatLogprobs
from prefixkv.api.replies.streaming import EventStream
from prefixkv.api.requests.request_headers import priority_of
from prefixkv.api.requests.request_id import request_id_of
from prefixkv.api.service import Service
from prefixkv.api.serving.access_log import USAGES_KEY
from prefixkv.errors import InvalidRequest
from prefixkv.outputs import Completion

# ids stand in paths
_NOT_IN_IDS = re.compile(r"[^A-Za-z0-9._-]")

# a short body may go on from a conversation of any length
_GOES_ON = b'"previous_response_id"'


def responses_router(service: Service) -> APIRouter:
    """Return the routes of stored conversations over `service`."""
    router = APIRouter()

    @router.post("/v1/responses", response_model=None)
    async def create_response(request: Request) -> Response:
        """Answer a turn of a conversation that the client sends, or that is stored here."""
        make_job = partial(response_job, tenant=tenant_of(request))
        job = await read_job(service, request, make_job, beside_the_loop=_GOES_ON)
        try:
            return await _respond(service, request, job)
        except InvalidRequest as error:
            # the engine knows prompts only; this client sent an input
            if error.param == "prompt":
                error.param = "input"
            raise

    @router.get("/v1/responses/{response_id}", response_model=None)
    async def retrieve_response(request: Request, response_id: str) -> Response:
        """Return a stored response."""
        if request.query_params.get("stream") == "true":
            raise UnsupportedField("stream is true; an ended response has no events.", "stream")
        stored = service.responses.get(tenant_of(request), response_id)
        return Response(stored.body, media_type="application/json")

    @router.delete("/v1/responses/{response_id}", response_model=None)
    async def delete_response(request: Request, response_id: str) -> Response:
        """Forget a stored response; those that went on from it stay."""
        service.responses.delete(tenant_of(request), response_id)
        return json_response({"id": response_id, "object": "response.deleted", "deleted": True})

    @router.post("/v1/responses/{response_id}/cancel", response_model=None)
    async def cancel_response(request: Request, response_id: str) -> Response:
        """Refuse: what runs in the foreground ends when its client leaves."""
        service.responses.get(tenant_of(request), response_id)
        raise InvalidRequest("Cannot cancel a synchronous response.", "response_id")

    @router.get("/v1/responses/{response_id}/input_items", response_model=None)
    async def list_input_items(request: Request, response_id: str) -> Response:
        """List the input of a stored response, the last item first unless `order=asc`."""
        stored = service.responses.get(tenant_of(request), response_id)
        return json_response(input_items(stored.turns.messages[:-1], response_id, request))

    return router


async def _respond(service: Service, http_request: Request, job: ResponseJob) -> Response:
    """Run `job` and answer it, unless the client leaves before."""
    tenant = tenant_of(http_request)
    name = _name(service, http_request, job)
    response = ResponseObject(name, job.model, job.request, job.params)
    deltas = generate(
        service.engine,
        job.prompts,
        job.params,
        response_id=response.id,
        salt=job.salt,
        priority=priority_of(http_request, job.request),
        cache_controls=cache_controls(service, http_request, job),
    )
    if job.request.is_prewarm:
        deltas = prewarmed(deltas)
    reports = cache_reports(service, http_request, job, name)

    finish = partial(_finish, service, tenant, job, response, reports)
    if not job.request.stream:
        (completion,) = await unless_disconnected(http_request.receive, collect(deltas, 1))
        http_request.scope[USAGES_KEY] = [completion.usage]
        return json_response(finish(completion))
    first = await unless_disconnected(http_request.receive, first_of(deltas))
    events = ResponseEvents(response, ChatLogprobs(service.engine.tokenizer))
    http_request.scope[USAGES_KEY] = events.usages
    return EventStream(response_events(first, deltas, events, finish), deltas)


def _name(service: Service, http_request: Request, job: ResponseJob) -> str:
    """Return what the id of the response ends with: the request's, unless it was used before."""
    request_id = request_id_of(http_request)
    request_id.adopt(job.request.request_id)
    name = _NOT_IN_IDS.sub("_", request_id.value)
    if not service.responses.claim(tenant_of(http_request), f"resp_{name}"):
        name += f"-{uuid.uuid4().hex[:8]}"  # a client may send one id for several requests
    return name


def _finish(
    service: Service,
    tenant: Tenant,
    job: ResponseJob,
    response: ResponseObject,
    reports: CacheReports,
    completion: Completion,
) -> dict[str, Any]:
    """Return the final object, and keep the answer's tokens and, unless declined, the response."""
    tokenizer = service.engine.tokenizer
    output = completion.outputs[0]
    status: Status = "incomplete" if output.finish_reason == "length" else "completed"
    logprobs = None
    if output.logprobs is not None:
        logprobs = response_logprobs(ChatLogprobs(tokenizer)(output.logprobs)["content"])
    message = response.message(status, output.text, logprobs)
    body = response.body(status, [message], completion.usage)
    body |= reports.all_members([completion.cache_report])
    if job.request.is_prewarm:
        return body
    stop_included = job.params.include_stop_str_in_output
    told = told_tokens(output, tokenizer, stop_included=stop_included)
    assert told is not None  # other ends are errors
    transcript = service.token_memory.remember(job.chat, output.text, told, tenant.name)
    if job.request.is_stored:
        answer = {"role": "assistant", "content": output.text}
        stored = StoredResponse(
            dump_json(body),
            job.turns.with_answer(answer),
            transcript,
            told.rest,
            job.request.instructions,
            job.request.chat_template_kwargs or {},
            job.salt,
        )
        service.responses.put(tenant, response.id, stored)
    return body
