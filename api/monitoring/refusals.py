"""Counts requests that were turned away because others come first."""

from collections import Counter
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from prefixkv.api.errors import answer_to
from prefixkv.api.route_path import route_path

_STATUSES = (429, 503)

Handler = Callable[[Request, Exception], Awaitable[Response]]


class Refusals:
    """Counts errors of the statuses that mean "later", by their code.

    Those that a route raises are seen by its handler, those of middleware by `CountedRefusals`.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def note(self, scope: Scope, error: Exception) -> None:
        """Count an error that is about to be answered; probes of health do not count."""
        answer = answer_to(error)
        if answer.status in _STATUSES and answer.code and route_path(scope).startswith("/v1/"):
            self.counts[answer.code] += 1

    def counting(self, handler: Handler) -> Handler:
        """Return the handler of errors, counting."""

        async def counted(request: Request, error: Exception) -> Response:
            self.note(request.scope, error)
            return await handler(request, error)

        return counted


class CountedRefusals:
    """ASGI middleware that counts what others inside it raise."""

    def __init__(self, app: ASGIApp, refusals: Refusals) -> None:
        self._app = app
        self._refusals = refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application and let errors pass."""
        try:
            await self._app(scope, receive, send)
        except Exception as error:
            if scope["type"] == "http":
                self._refusals.note(scope, error)
            raise
