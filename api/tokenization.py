"""POST /tokenize and /detokenize, GET /tokenizer_info: vLLM's shapes, at vLLM's paths."""

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from prefixkv.api.endpoint import read_job
from prefixkv.api.replies.bodies import json_response
from prefixkv.api.requests.body import parse_object
from prefixkv.api.requests.messages import chat_prompt
from prefixkv.api.requests.prompts import require_token_ids
from prefixkv.api.requests.schemas import DetokenizeRequest, TokenizeRequest, parse_request
from prefixkv.api.service import Service
from prefixkv.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Tokenized:
    """The tokens of a text or a chat; `strings` if they were asked for."""

    token_ids: list[int]
    strings: list[str] | None


def tokenization_router(service: Service) -> APIRouter:
    """Return the routes from text to token ids and back."""
    router = APIRouter()

    @router.post("/tokenize", response_model=None)
    async def tokenize(request: Request) -> Response:
        """Return the tokens of a prompt or of a chat, as a completion would compute them."""
        tokenized = await read_job(service, request, tokenized_body)
        body = {
            "count": len(tokenized.token_ids),
            "max_model_len": service.engine.max_model_len,
            "tokens": tokenized.token_ids,
            "token_strs": tokenized.strings,
        }
        return json_response(body)

    @router.post("/detokenize", response_model=None)
    async def detokenize(request: Request) -> Response:
        """Return the text of tokens, special ones included."""
        return json_response({"prompt": await read_job(service, request, detokenized_body)})

    @router.get("/tokenizer_info", response_model=None)
    async def tokenizer_info() -> Response:
        """Describe the tokenizer: its special tokens and its chat template."""
        return json_response(service.engine.tokenizer.describe())

    return router


def tokenized_body(service: Service, raw: bytes) -> Tokenized:
    """Tokenise what a body holds; takes time proportional to the text.

    Raises:
        InvalidRequest: the body or a field of it is wrong.
        ModelNotFound: it names a model that is not served.
    """
    request = parse_request(TokenizeRequest, parse_object(raw))
    service.resolve_model(request.model)
    tokenizer = service.engine.tokenizer
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequest("Exactly one of prompt and messages must be there.", "prompt")
    if request.prompt is None:
        ids = chat_prompt(request, tokenizer)
    else:
        ids = tokenizer.encode(request.prompt, request.add_special_tokens is not False)
    return Tokenized(ids, tokenizer.token_strings(ids) if request.return_token_strs else None)


def detokenized_body(service: Service, raw: bytes) -> str:
    """Return the text of the tokens that a body holds; raises as `tokenized_body` does."""
    request = parse_request(DetokenizeRequest, parse_object(raw))
    service.resolve_model(request.model)
    ids: list[Any] | None = request.tokens
    if ids is None:
        raise InvalidRequest("tokens is missing.", "tokens")
    require_token_ids(ids, "tokens", service.engine.vocab_size)
    return service.engine.tokenizer.decode(ids, skip_special_tokens=False)
