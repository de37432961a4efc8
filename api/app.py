"""The HTTP application over one engine."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from prefixkv.api.access.api_keys import ApiKeys
from prefixkv.api.access.authentication import Authentication
from prefixkv.api.access.key_limits import KeyLimits
from prefixkv.api.caching.cache_admin import cache_admin_router
from prefixkv.api.caching.explain import explain_router
from prefixkv.api.chat_completions import chat_completions_router
from prefixkv.api.completions import completions_router
from prefixkv.api.conversations.responses import responses_router
from prefixkv.api.engine_interface import ServingEngine
from prefixkv.api.errors import UnexpectedErrors, handle_error, handle_http_exception
from prefixkv.api.history.token_memory import TokenMemory
from prefixkv.api.models import models_router
from prefixkv.api.monitoring.health import health_router
from prefixkv.api.monitoring.metrics import metrics_router
from prefixkv.api.monitoring.refusals import CountedRefusals, Refusals
from prefixkv.api.options.server_options import MAX_BODY_BYTES, TOKEN_MEMORY_BYTES
from prefixkv.api.replies.openapi import describe_api
from prefixkv.api.requests.request_id import RequestIds
from prefixkv.api.service import Service
from prefixkv.api.serving.access_log import AccessLog
from prefixkv.api.serving.draining import Drain, DrainGate
from prefixkv.api.tokenization import tokenization_router
from prefixkv.errors import PrefixKVError


def create_app(
    engine: ServingEngine,
    served_model_names: Sequence[str],
    *,
    max_body_bytes: int = MAX_BODY_BYTES,
    token_memory_bytes: int = TOKEN_MEMORY_BYTES,
    keys: ApiKeys | None = None,
    allowed_origins: Sequence[str] = (),
    silent_paths: Sequence[str] = (),
    drain: Drain | None = None,
) -> FastAPI:
    """Return an ASGI application that serves `engine` in the shapes of OpenAI's API.

    Its lifespan starts the engine unless it runs already, and stops it at the end.

    Args:
        engine: started by the application, or before.
        served_model_names: names that clients may ask for; the first is the default.
        max_body_bytes: larger request bodies are refused with 413 while they arrive.
        token_memory_bytes: for answers as ids, which the next turn of a chat takes up; 0 for none.
        keys: without which no request is served; None serves everybody.
        allowed_origins: of web pages whose scripts may read answers; `*` means all.
        silent_paths: which the log of requests leaves out.
        drain: with which the caller ends the service in good order.

    Raises:
        ConfigError: there is no name, or an empty one.
    """
    keys = keys or ApiKeys()
    service = Service(
        engine=engine,
        served_model_names=tuple(dict.fromkeys(served_model_names)),
        max_body_bytes=max_body_bytes,
        token_memory=TokenMemory(token_memory_bytes),
        drain=drain or Drain(),
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if not engine.is_running:
            await engine.start()
        try:
            yield
        finally:
            await engine.stop()

    # a redirect would make clients send a body twice
    app = FastAPI(
        title="prefixkv", version=version("prefixkv"), lifespan=lifespan, redirect_slashes=False
    )
    refusals = Refusals()
    _add_routes(app, service, keys, refusals)
    for kind in (PrefixKVError, ClientDisconnect):
        app.add_exception_handler(kind, refusals.counting(handle_error))
    app.add_exception_handler(HTTPException, handle_http_exception)
    # the first one added is the innermost
    app.add_middleware(KeyLimits)
    app.add_middleware(DrainGate, drain=service.drain)
    app.add_middleware(Authentication, keys=keys)
    app.add_middleware(CountedRefusals, refusals=refusals)
    app.add_middleware(UnexpectedErrors)
    if allowed_origins:
        app.add_middleware(CORSMiddleware, **_cors(allowed_origins))
    app.add_middleware(AccessLog, silent_paths=silent_paths)
    app.add_middleware(RequestIds)
    return app


def _add_routes(app: FastAPI, service: Service, keys: ApiKeys, refusals: Refusals) -> None:
    """Give `app` all routes, and then the document of what they take and give."""
    for make_router in (
        completions_router,
        chat_completions_router,
        responses_router,
        models_router,
        tokenization_router,
        health_router,
        explain_router,
    ):
        app.include_router(make_router(service))
    app.include_router(cache_admin_router(service, keys))
    app.include_router(metrics_router(service, refusals))
    describe_api(app)


def _cors(allowed_origins: Sequence[str]) -> dict[str, Any]:
    """Return what browsers allow scripts of those origins; cookies are no part of the API."""
    return {
        "allow_origins": list(allowed_origins),
        "allow_methods": ["*"],
        "allow_headers": ["*"],
        "expose_headers": ["x-request-id", "retry-after"],
    }
