"""ASGI middleware that finds out whose a request is by its API key, before the body is read."""

from starlette.types import ASGIApp, Receive, Scope, Send

from prefixkv.api.access.api_keys import ApiKeys
from prefixkv.api.access.tenant import ANONYMOUS, SCOPE_KEY, Tenant
from prefixkv.api.errors import InvalidApiKey
from prefixkv.api.route_path import route_path

OPEN_PATHS = frozenset({"/health", "/ready", "/version", "/metrics"})
"""What load balancers and monitoring ask without a key.

All else is guarded, so that no route is left open by being forgotten. vLLM guards `/v1` only; but
tokenising costs processor time, and the tokenizer's description is the operator's to show.
"""


class Authentication:
    """Puts the tenant into the scope; refuses a guarded request whose key is missing or wrong.

    A preflight of a browser cannot carry a key, and gets nothing but headers.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application for a tenant.

        Raises:
            InvalidApiKey: never repeating what the client sent.
        """
        if scope["type"] == "http":
            scope[SCOPE_KEY] = self._tenant(scope)
        await self._app(scope, receive, send)

    def _tenant(self, scope: Scope) -> Tenant:
        shown = _bearer_token(scope)
        tenant = self._keys.find(shown) if shown else None
        if tenant is not None:
            return tenant
        is_open = scope["method"] == "OPTIONS" or route_path(scope) in OPEN_PATHS
        if self._keys.are_required and not is_open:
            raise InvalidApiKey(_REASONS[bool(shown)])
        return ANONYMOUS


_REASONS = {
    False: "There is no API key; send it as 'Authorization: Bearer KEY'.",
    True: "The API key is not known here.",
}


def _bearer_token(scope: Scope) -> bytes:
    """Return the key that the request shows; nothing if there is none, or more than one."""
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(values) != 1:
        return b""
    scheme, _, token = values[0].strip().partition(b" ")
    return bytes(token.strip()) if scheme.lower() == b"bearer" else b""
