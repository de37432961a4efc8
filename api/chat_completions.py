"""POST /v1/chat/completions."""

from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from prefixkv.api.bodies import chat_body
from prefixkv.api.body import parse_object
from prefixkv.api.breakpoints import breakpoint_positions, take_marks
from prefixkv.api.cache_plan import cache_plan
from prefixkv.api.endpoint import Job, Shape, answer, read_job
from prefixkv.api.logprobs import ChatLogprobs
from prefixkv.api.messages import chat_prompt, chat_text
from prefixkv.api.prewarm import prewarm_params
from prefixkv.api.schemas import ChatCompletionRequest, parse_request
from prefixkv.api.service import Service
from prefixkv.api.streaming import ChatChunks
from prefixkv.api.unsupported import UNSUPPORTED_IN_CHATS, refuse_unsupported
from prefixkv.errors import InvalidRequest

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
        job = await read_job(service, request, chat_job)
        try:
            return await answer(service, request, job, _SHAPE)
        except InvalidRequest as error:
            # the engine knows prompts only; this client sent messages
            if error.param == "prompt":
                error.param = "messages"
            raise

    return router


def chat_job(service: Service, raw: bytes) -> Job:
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
    prompt = chat_prompt(request, tokenizer)
    render = partial(chat_text, request, tokenizer)
    positions = breakpoint_positions(marks, request.messages or (), render, prompt, tokenizer)
    plan = cache_plan(request, len(prompt), marks, positions)
    return Job(
        [prompt], params, request, model, cache_controls=[plan.control], unplaced=plan.unplaced
    )
