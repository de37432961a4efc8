"""The id of a request: the client's own `X-Request-Id` where it is sane, else a fresh one."""

import uuid
from contextvars import ContextVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prefixkv.errors import InvalidRequest

MAX_CHARS = 128
_SCOPE_KEY = "prefixkv.request_id"


class RequestId:
    """The id of the request at hand; the body may still name one if no header did."""

    __slots__ = ("_is_from_header", "value")

    def __init__(self, header: str | None) -> None:
        header = (header or "").strip()[:MAX_CHARS]
        self._is_from_header = is_printable(header)
        self.value = header if self._is_from_header else uuid.uuid4().hex

    def adopt(self, named: str | None) -> None:
        """Take the id that the body names, unless a header named one already.

        Raises:
            InvalidRequest: the name is empty, too long or not printable ASCII.
        """
        if named is None:
            return
        if len(named) > MAX_CHARS or not is_printable(named):
            raise InvalidRequest(
                f"request_id must be 1 to {MAX_CHARS} printable ASCII characters", "request_id"
            )
        if not self._is_from_header:
            self.value = named


_current: ContextVar[RequestId | None] = ContextVar("prefixkv.request_id", default=None)


class RequestIds:
    """ASGI middleware that gives every request an id and echoes it as `x-request-id`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application with the id in its scope."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = RequestId(Headers(scope=scope).get("x-request-id"))
        scope[_SCOPE_KEY] = request_id
        _current.set(request_id)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id.value
            await send(message)

        await self._app(scope, receive, send_with_id)


def request_id_of(request: Request) -> RequestId:
    """Return the id that the middleware gave to `request`."""
    return request_id_in(request.scope)


def request_id_in(scope: Scope) -> RequestId:
    """Return the id that the middleware put into `scope`."""
    request_id = scope[_SCOPE_KEY]
    assert isinstance(request_id, RequestId)
    return request_id


def current_request_id() -> str | None:
    """Return the id of the request that the running code belongs to, for its log lines."""
    request_id = _current.get()
    return None if request_id is None else request_id.value


def is_printable(text: str) -> bool:
    """Return whether `text` is non-empty printable ASCII, so that it can stand in a header."""
    return bool(text) and text.isascii() and text.isprintable()
