"""The OpenAPI document: bodies from the schemas, statuses from the table of errors.

Routes read raw bodies and write prepared ones, so FastAPI itself knows of neither.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from prefixkv.api.access.authentication import OPEN_PATHS
from prefixkv.api.conversations.response_request import ResponseRequest
from prefixkv.api.errors import (
    ANSWERS,
    AdminKeyRequired,
    BodyTooLarge,
    ResponseNotFound,
    UnknownRequest,
    WrongMediaType,
)
from prefixkv.api.replies.answer_schemas import (
    CHAT_COMPLETION,
    COMPLETION,
    DELETED,
    DETOKENIZED,
    ERROR,
    EXPLANATION,
    HEALTH,
    ITEMS,
    MODEL,
    MODEL_LIST,
    RESET,
    RESPONSE,
    TOKENIZED,
    VERSION,
    JsonSchema,
)
from prefixkv.api.requests.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from prefixkv.errors import EngineStopped, InvalidRequest, ModelNotFound, QueueFull, StepFailed

Errors = tuple[type[Exception], ...]

OF_A_BODY: Errors = (InvalidRequest, BodyTooLarge, WrongMediaType)
OF_A_RESPONSE: Errors = (InvalidRequest, ResponseNotFound)
OF_THE_ENGINE: Errors = (QueueFull, StepFailed, EngineStopped)

OF_KEYS: Errors = tuple(error for error, answer in ANSWERS.items() if answer.status == 401)


@dataclass(frozen=True, slots=True)
class Operation:
    """What a route takes and gives.

    Attributes:
        answer: schema of its 200; anything where it is empty.
        streams: whether it answers with events if the body says `stream: true`.
    """

    body: type[BaseModel] | None = None
    answer: JsonSchema | None = None
    errors: Errors = ()
    streams: bool = False
    media_type: str = "application/json"


def _generation(body: type[BaseModel], answer: JsonSchema, *more: type[Exception]) -> Operation:
    errors = (*OF_A_BODY, ModelNotFound, *more, *OF_THE_ENGINE)
    return Operation(body, answer, errors, streams=True)


OPERATIONS: Mapping[str, Operation] = MappingProxyType(
    {
        "POST /v1/completions": _generation(CompletionRequest, COMPLETION),
        "POST /v1/chat/completions": _generation(ChatCompletionRequest, CHAT_COMPLETION),
        "POST /tokenize": Operation(TokenizeRequest, TOKENIZED, (*OF_A_BODY, ModelNotFound)),
        "POST /detokenize": Operation(DetokenizeRequest, DETOKENIZED, (*OF_A_BODY, ModelNotFound)),
        "GET /v1/models": Operation(answer=MODEL_LIST),
        "GET /v1/models/{model_id}": Operation(answer=MODEL, errors=(ModelNotFound,)),
        "POST /v1/responses": _generation(ResponseRequest, RESPONSE, ResponseNotFound),
        "GET /v1/responses/{response_id}": Operation(answer=RESPONSE, errors=OF_A_RESPONSE),
        "DELETE /v1/responses/{response_id}": Operation(answer=DELETED, errors=OF_A_RESPONSE),
        "POST /v1/responses/{response_id}/cancel": Operation(errors=OF_A_RESPONSE),
        "GET /v1/responses/{response_id}/input_items": Operation(
            answer=ITEMS, errors=OF_A_RESPONSE
        ),
        "GET /v1/prefixkv/explain/{request_id}": Operation(
            answer=EXPLANATION, errors=(UnknownRequest,)
        ),
        "GET /tokenizer_info": Operation(),
        "GET /metrics": Operation(media_type="text/plain"),
        "POST /reset_prefix_cache": Operation(
            answer=RESET, errors=(AdminKeyRequired, EngineStopped)
        ),
        "GET /health": Operation(answer=HEALTH, errors=(EngineStopped,)),
        "GET /ready": Operation(answer=HEALTH, errors=(EngineStopped,)),
        "GET /version": Operation(answer=VERSION),
    }
)
"""By method and path; a route that is not here is documented as one that cannot be refused."""

MESSAGE: JsonSchema = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"type": "string", "minLength": 1, "examples": ["system", "user", "assistant"]},
        "content": {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"$ref": "#/components/schemas/TextPart"}},
                {"type": "null"},
            ]
        },
        "tool_calls": {"type": ["array", "null"], "items": {"type": "object"}},
        "tool_call_id": {"type": ["string", "null"]},
    },
}
MESSAGES: JsonSchema = {"type": "array", "minItems": 1, "items": MESSAGE}
TEXT_PART: JsonSchema = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
PROMPT: JsonSchema = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
        _IDS,
        {"type": "array", "minItems": 1, "items": _IDS},
    ]
}
INPUT: JsonSchema = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "minItems": 1, "items": {"type": "object"}},
    ]
}
# what the schemas leave to be judged later, because a shape alone does not tell enough
LATER: Mapping[tuple[str, str], JsonSchema] = MappingProxyType(
    {
        ("CompletionRequest", "prompt"): PROMPT,
        ("ChatCompletionRequest", "messages"): MESSAGES,
        ("DetokenizeRequest", "tokens"): _IDS,
        ("ResponseRequest", "input"): INPUT,
    }
)


def describe_api(app: FastAPI) -> None:
    """Make `app` serve this document in place of FastAPI's own, at the same path."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = openapi_document(app)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign] # as FastAPI's manual tells to


def openapi_document(app: FastAPI) -> dict[str, Any]:
    """Return the document of the routes that `app` has."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            known = OPERATIONS.get(f"{method.upper()} {path}", Operation())
            operation["responses"] = _responses(known, () if path in OPEN_PATHS else OF_KEYS)
            if known.body is not None:
                schema = {"$ref": _reference(known.body.__name__)}
                operation["requestBody"] = {"required": True, "content": _json(schema)}
    document["components"] = {"schemas": _components()}
    return document


def _components() -> dict[str, JsonSchema]:
    bodies = [known.body for known in OPERATIONS.values() if known.body is not None]
    _, definitions = models_json_schema(
        [(body, "validation") for body in bodies], ref_template=_reference("{model}")
    )
    schemas: dict[str, JsonSchema] = definitions["$defs"]
    for (name, field), schema in LATER.items():
        schemas[name]["properties"][field] = schema
        schemas[name]["required"] = [field]
    schemas["TokenizeRequest"] |= {"oneOf": [_only("prompt"), _only("messages")]}
    return {**schemas, "TextPart": TEXT_PART, "Error": ERROR}


def _only(field: str) -> JsonSchema:
    (other,) = {"prompt", "messages"} - {field}
    return {"required": [field], "properties": {other: {"type": "null"}}}


def _responses(known: Operation, of_keys: Errors) -> dict[str, Any]:
    content: dict[str, Any] = {known.media_type: {"schema": known.answer or {}}}
    if known.streams:
        content["text/event-stream"] = {}
    responses: dict[str, Any] = {"200": {"description": "Done.", "content": content}}
    by_status: dict[int, list[type[Exception]]] = {}
    for error in (*known.errors, *of_keys):
        by_status.setdefault(ANSWERS[error].status, []).append(error)
    for status, errors in sorted(by_status.items()):
        responses[str(status)] = _refusal(errors)
    return responses


def _refusal(errors: Sequence[type[Exception]]) -> dict[str, Any]:
    first_lines = [(error.__doc__ or error.__name__).partition("\n")[0] for error in errors]
    refusal: dict[str, Any] = {
        "description": " ".join(first_lines),
        "content": _json({"$ref": _reference("Error")}),
    }
    if all(ANSWERS[error].retry_after_s is not None for error in errors):
        refusal["headers"] = {"Retry-After": {"schema": {"type": "string"}, "required": True}}
    return refusal


def _json(schema: JsonSchema) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _reference(name: str) -> str:
    return f"#/components/schemas/{name}"
