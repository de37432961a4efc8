"""The end of a server: what runs may finish, and nothing new begins."""

from starlette.types import ASGIApp, Receive, Scope, Send

from prefixkv.api.errors import Draining
from prefixkv.api.route_path import is_generation


class Drain:
    """Whether the server is about to end, and how many requests it still owes an answer.

    Attributes:
        has_begun: nothing new is generated.
        num_running: requests that generate, from their headers to the end of their answers.
    """

    def __init__(self) -> None:
        self.has_begun = False
        self.num_running = 0

    def begin(self) -> None:
        """Refuse what comes from now on; may be called in a signal handler."""
        self.has_begun = True

    def require_open(self) -> None:
        """Raise Draining if the server is about to end."""
        if self.has_begun:
            raise Draining("The server is shutting down; try another one, or this one later.")


class DrainGate:
    """ASGI middleware that counts requests that generate, and refuses them during a drain.

    Routes that cost nothing go on, so that a client can still cancel, and a load balancer see.
    """

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self._app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application.

        Raises:
            Draining: the server is about to end.
        """
        if not is_generation(scope):
            await self._app(scope, receive, send)
            return
        self._drain.require_open()
        self._drain.num_running += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._drain.num_running -= 1
