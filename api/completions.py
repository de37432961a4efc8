"""POST /v1/completions."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from prefixkv.api.caching.cache_plan import cache_plan
from prefixkv.api.caching.prewarm import prewarm_params
from prefixkv.api.endpoint import Job, Shape, answer, read_job
from prefixkv.api.replies.bodies import completion_body
from prefixkv.api.replies.echo import Echo, make_echo
from prefixkv.api.replies.logprobs import CompletionLogprobs
from prefixkv.api.replies.streaming import CompletionChunks
from prefixkv.api.requests.body import parse_object
from prefixkv.api.requests.prompts import as_list, token_prompts
from prefixkv.api.requests.schemas import CompletionRequest, parse_request
from prefixkv.api.requests.unsupported import UNSUPPORTED_IN_COMPLETIONS, refuse_unsupported
from prefixkv.api.service import COMPLETION_MAX_TOKENS, Service

_SHAPE = Shape("cmpl", completion_body, CompletionChunks, CompletionLogprobs)


def completions_router(service: Service) -> APIRouter:
    """Return the route of text completions over `service`."""
    router = APIRouter()

    @router.post("/v1/completions", response_model=None)
    async def create_completion(request: Request) -> Response:
        """Continue one prompt or several."""
        job = await read_job(service, request, completion_job)
        return await answer(service, request, job, _SHAPE)

    return router


def completion_job(service: Service, raw: bytes) -> Job:
    """Make a job of a body; takes time proportional to the text.

    Raises:
        InvalidRequest: the body or a field of it is wrong.
        ModelNotFound: it names a model that is not served.
    """
    body = parse_object(raw)
    refuse_unsupported(body, UNSUPPORTED_IN_COMPLETIONS)
    request = parse_request(CompletionRequest, body)
    service.unknown_fields.note((request.model_extra or {}).keys() - UNSUPPORTED_IN_COMPLETIONS)
    model = service.resolve_model(request.model)
    params = service.sampling_params(request, COMPLETION_MAX_TOKENS)
    prompts = token_prompts(
        request.prompt,
        service.engine.tokenizer,
        vocab_size=service.engine.vocab_size,
        add_special_tokens=request.add_special_tokens is not False,
    )
    plans = [cache_plan(request, len(prompt)) for prompt in prompts]
    if request.is_prewarm:
        return Job(prompts, prewarm_params(params), request, model, plans)
    echoes: list[Echo] = []
    if request.echo:
        given = as_list(request.prompt)
        echoes = [
            make_echo(prompt, ids, service.engine.tokenizer)
            for prompt, ids in zip(given, prompts, strict=True)
        ]
    return Job(prompts, params, request, model, plans, echoes, request.is_only_echo)
