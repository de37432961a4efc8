"""ASGI middleware that bounds how many requests of one API key run or wait at once."""

from collections import Counter

from starlette.types import ASGIApp, Receive, Scope, Send

from prefixkv.api.access.tenant import ANONYMOUS, SCOPE_KEY, Tenant
from prefixkv.api.errors import KeyLimitReached
from prefixkv.api.route_path import is_generation


class KeyLimits:
    """Counts requests that generate, from their headers to the end of their answers.

    Nothing is awaited between looking and counting, and every way out gives the place back.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._num_running: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application unless the key has used up its places.

        Raises:
            KeyLimitReached: with the numbers.
        """
        tenant: Tenant = scope.get(SCOPE_KEY, ANONYMOUS)
        if tenant.max_requests is None or not is_generation(scope):
            await self._app(scope, receive, send)
            return
        num_running = self._num_running[tenant.name]
        if num_running >= tenant.max_requests:
            raise KeyLimitReached(
                f"{num_running} requests of this API key run or wait; "
                f"it may have {tenant.max_requests} at once."
            )
        self._num_running[tenant.name] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_running[tenant.name] -= 1
