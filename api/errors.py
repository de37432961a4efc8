"""The one table from an error to its HTTP answer, and the body that every error has.

The body is `{"error": {"message", "type", "param", "code"}}`, all four keys always, at any status.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prefixkv.errors import (
    EngineStopped,
    InvalidRequest,
    ModelNotFound,
    PrefixKVError,
    QueueFull,
    StaleSequence,
    StepFailed,
)

MAX_MESSAGE_BYTES = 1000
MAX_PARAM_CHARS = 100

logger = logging.getLogger("prefixkv.api")


class UnsupportedField(InvalidRequest):
    """A field that would change the answer and is not served yet."""

    code = "unsupported_parameter"


class UnknownRequest(InvalidRequest):
    """The id of a request that is not remembered."""

    code = "request_not_found"


class BodyTooLarge(InvalidRequest):
    """The request body is over the server's limit."""

    code = "request_body_too_large"


class WrongMediaType(InvalidRequest):
    """The request body is not declared as JSON."""

    code = "unsupported_media_type"


class ResponseNotFound(InvalidRequest):
    """No stored response of this tenant has that id (any more)."""


class InvalidApiKey(PrefixKVError):
    """The request shows no API key, or one that the server does not know."""


class AdminKeyRequired(PrefixKVError):
    """The route is for the holder of the admin key."""


class KeyLimitReached(PrefixKVError):
    """As many requests of the API key run or wait as it may have at once; try again later."""


class Draining(EngineStopped):
    """The server is about to end: it finishes what runs and begins nothing."""


@dataclass(frozen=True, slots=True)
class Answer:
    """How one kind of error is told to the client."""

    status: int
    type: str
    code: str | None = None
    retry_after_s: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


ANSWERS: Mapping[type[Exception], Answer] = MappingProxyType(
    {
        InvalidRequest: Answer(400, "invalid_request_error"),
        InvalidApiKey: Answer(
            401, "authentication_error", "invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
        ),
        AdminKeyRequired: Answer(403, "permission_error", "admin_key_required"),
        ModelNotFound: Answer(404, "not_found_error", "model_not_found"),
        UnknownRequest: Answer(404, "not_found_error"),
        ResponseNotFound: Answer(404, "invalid_request_error"),
        StaleSequence: Answer(409, "conflict_error", "stale_sequence"),
        BodyTooLarge: Answer(413, "invalid_request_error"),
        WrongMediaType: Answer(415, "invalid_request_error"),
        QueueFull: Answer(429, "rate_limit_error", "queue_full", retry_after_s=1),
        KeyLimitReached: Answer(429, "rate_limit_error", "key_limit", retry_after_s=1),
        # nobody reads this one: the status is what proxies log for a client that left
        ClientDisconnect: Answer(499, "invalid_request_error", "client_disconnected"),
        StepFailed: Answer(500, "server_error", "step_failed"),
        Exception: Answer(500, "server_error", "internal_error"),
        EngineStopped: Answer(503, "service_unavailable_error", "engine_stopped", retry_after_s=5),
        Draining: Answer(503, "service_unavailable_error", "draining", retry_after_s=5),
    }
)
"""The nearest class in the error's own line of ancestors decides."""

STATUS_TYPES: Mapping[int, str] = MappingProxyType(
    {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
)
"""Types of the errors that routing raises by status; other 4xx are invalid requests."""


def answer_to(error: Exception) -> Answer:
    """Return the row of the table for `error`."""
    return next(ANSWERS[cls] for cls in type(error).__mro__ if cls in ANSWERS)


def error_body(
    message: str, type_: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return the OpenAI error object, with message and param cut to a bounded length."""
    encoded = message.encode("utf-8", "replace")
    if len(encoded) > MAX_MESSAGE_BYTES:
        encoded = encoded[: MAX_MESSAGE_BYTES - 3] + b"..."
    if param is not None:
        param = param[:MAX_PARAM_CHARS]
    text = encoded.decode("utf-8", "ignore")
    return {"error": {"message": text, "type": type_, "param": param, "code": code}}


def describe(error: Exception) -> dict[str, Any]:
    """Return the body for `error`; what was not raised on purpose is logged and not shown."""
    answer = answer_to(error)
    if answer.status >= 500 and not isinstance(error, EngineStopped):
        logger.error("a request failed: %s", error, exc_info=error)
    is_ours = isinstance(error, PrefixKVError)
    message = str(error) if is_ours and str(error) else "The server failed to answer; see its log."
    code = getattr(error, "code", None) or answer.code
    return error_body(message, answer.type, getattr(error, "param", None), code)


def error_response(error: Exception) -> JSONResponse:
    """Return the response for an error of the table."""
    answer = answer_to(error)
    headers = dict(answer.headers)
    if answer.retry_after_s is not None:
        headers["Retry-After"] = str(answer.retry_after_s)
    return JSONResponse(describe(error), answer.status, headers)


async def handle_error(request: Request, error: Exception) -> JSONResponse:
    """Answer an error raised by a route."""
    return error_response(error)


async def handle_http_exception(request: Request, error: Exception) -> JSONResponse:
    """Answer what routing itself refuses: an unknown path, a method that a path lacks."""
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {request.url.path}"
    type_ = STATUS_TYPES.get(error.status_code, "invalid_request_error")
    return JSONResponse(error_body(message, type_), error.status_code, error.headers)


class UnexpectedErrors:
    """ASGI middleware that turns what no handler knows into a 500 of the usual shape.

    Starlette's own last resort re-raises after answering, which would log everything twice.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application; answer its exception if nothing was sent yet."""
        started = False

        async def send_noting_start(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, send_noting_start)
        except Exception as error:
            if started or scope["type"] != "http":
                raise
            await error_response(error)(scope, receive, send)
