"""ASGI middleware that logs one line for each request: who, what, how it ended, what it cost.

Never what was asked: no query, no header and no body is in it.
"""

import logging
import time
from collections.abc import Collection, Iterable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prefixkv.api.access.tenant import ANONYMOUS, SCOPE_KEY
from prefixkv.api.replies.bodies import usage_body
from prefixkv.api.requests.request_id import request_id_in
from prefixkv.api.route_path import route_path
from prefixkv.outputs import Usage

USAGES_KEY = "prefixkv.usages"
"""Where an endpoint leaves the usage of each prompt; it is read when the request has ended."""

MAX_PATH_CHARS = 200

logger = logging.getLogger("prefixkv.access")


class AccessLog:
    """Logs at level INFO, unless the path is one of `silent_paths`."""

    def __init__(self, app: ASGIApp, silent_paths: Collection[str] = ()) -> None:
        self._app = app
        self._silent_paths = frozenset(silent_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application and log what became of the request."""
        is_silent = scope["type"] != "http" or not logger.isEnabledFor(logging.INFO)
        if is_silent or route_path(scope) in self._silent_paths:
            await self._app(scope, receive, send)
            return
        begin = time.perf_counter()
        status: int | None = None
        is_whole = False

        async def send_noting(message: Message) -> None:
            nonlocal status, is_whole
            if message["type"] == "http.response.start":
                status = message["status"]
            elif not message.get("more_body"):
                is_whole = True
            await send(message)

        try:
            await self._app(scope, receive, send_noting)
        finally:
            _log(scope, status, time.perf_counter() - begin, is_cut=not is_whole)


def _log(scope: Scope, status: int | None, duration_s: float, *, is_cut: bool) -> None:
    # as it came, percent-encoded: a line break in it would begin a new line of the log
    path = (scope.get("raw_path") or b"").decode("latin-1")[:MAX_PATH_CHARS]
    fields = {
        "method": scope["method"],
        "path": path,
        "status": status,
        "duration_ms": round(duration_s * 1000, 1),
        "tenant": scope.get(SCOPE_KEY, ANONYMOUS).name,
        "client": (scope.get("client") or ("",))[0],
        "request_id": request_id_in(scope).value,
        **({"is_cut": True} if is_cut else {}),  # the client left, or the server failed
        **_token_counts(scope.get(USAGES_KEY, ())),
    }
    logger.info("%s %s", scope["method"], path, extra={"fields": fields})


def _token_counts(usages: Iterable[Usage]) -> dict[str, Any]:
    body = usage_body(usages)
    if not body["prompt_tokens"]:
        return {}
    return {
        "prompt_tokens": body["prompt_tokens"],
        "cached_tokens": body["prompt_tokens_details"]["cached_tokens"],
        "completion_tokens": body["completion_tokens"],
    }
