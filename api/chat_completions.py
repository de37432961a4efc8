"""POST /v1/chat/completions."""

from collections.abc import Sequence
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from prefixkv.api.access.tenant import Tenant, tenant_of
from prefixkv.api.caching.breakpoints import Mark, Message, breakpoint_positions, take_marks
from prefixkv.api.caching.cache_plan import CachePlan, cache_plan
from prefixkv.api.caching.prewarm import prewarm_params
from prefixkv.api.endpoint import Job, Shape, answer, read_job
from prefixkv.api.engine_interface import Tokenizer
from prefixkv.api.history.token_memory import ChatTokens
from prefixkv.api.history.told_tokens import told_tokens
from prefixkv.api.replies.bodies import chat_body
from prefixkv.api.replies.logprobs import ChatLogprobs
from prefixkv.api.replies.streaming import ChatChunks
from prefixkv.api.requests.body import parse_object
from prefixkv.api.requests.messages import render, require_tokens
from prefixkv.api.requests.schemas import ChatCompletionRequest, parse_request
from prefixkv.api.requests.unsupported import UNSUPPORTED_IN_CHATS, refuse_unsupported
from prefixkv.api.service import Service
from prefixkv.errors import InvalidRequest
from prefixkv.outputs import BranchOutput
from prefixkv.sampling_params import SamplingParams

_SHAPE = Shape(
    "chatcmpl",
    chat_body,
    ChatChunks,
    lambda tokenizer, _: ChatLogprobs(tokenizer),
    scores_each_choice=False,
)


def chat_completions_router(service: Service) -> APIRouter:
    """Return the route of chats over `service`."""
    router = APIRouter()

    @router.post("/v1/chat/completions", response_model=None)
    async def create_chat_completion(request: Request) -> Response:
        """Answer the last message of a chat."""
        job = await read_job(service, request, partial(chat_job, tenant=tenant_of(request)))
        try:
            return await answer(service, request, job, _SHAPE)
        except InvalidRequest as error:
            # the engine knows prompts only; this client sent messages
            if error.param == "prompt":
                error.param = "messages"
            raise

    return router


def chat_job(service: Service, raw: bytes, tenant: Tenant) -> Job:
    """Make a job of a body; takes time proportional to the text.

    Raises:
        InvalidRequest: the body or a field of it is wrong.
        ModelNotFound: it names a model that is not served.
    """
    body = parse_object(raw)
    refuse_unsupported(body, UNSUPPORTED_IN_CHATS)
    marks = take_marks(body.get("messages"))
    request = parse_request(ChatCompletionRequest, body)
    service.unknown_fields.note((request.model_extra or {}).keys() - UNSUPPORTED_IN_CHATS)
    model = service.resolve_model(request.model)
    params = service.sampling_params(request, default_max_tokens=None)
    if request.is_prewarm:
        params = prewarm_params(params)
    tokenizer = service.engine.tokenizer
    salt = tenant.salt_for(request.cache_salt)
    chat = service.token_memory.tokens(render(request, tokenizer), salt, tokenizer)
    require_tokens(chat.token_ids)
    note = partial(remember_answer, service, chat, params, tenant)
    plan = _cache_plan(request, marks, chat.token_ids, tokenizer)
    return Job([chat.token_ids], params, request, model, [plan], note=note)


def _cache_plan(
    request: ChatCompletionRequest,
    marks: Sequence[Mark],
    prompt: Sequence[int],
    tokenizer: Tokenizer,
) -> CachePlan:
    def text(messages: Sequence[Message]) -> str:
        return render(request.model_copy(update={"messages": messages}), tokenizer).text

    positions = breakpoint_positions(marks, request.messages or (), text, prompt, tokenizer)
    return cache_plan(request, len(prompt), marks, positions)


def remember_answer(
    service: Service,
    chat: ChatTokens,
    params: SamplingParams,
    tenant: Tenant,
    output: BranchOutput,
) -> None:
    """Keep the tokens of an answer to `chat` for its next turn; takes time for that answer only."""
    tokenizer = service.engine.tokenizer
    told = told_tokens(output, tokenizer, stop_included=params.include_stop_str_in_output)
    if told is not None:
        service.token_memory.remember(chat, output.text, told, tenant.name)
