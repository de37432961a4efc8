"""The HTTP application over one engine."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from prefixkv.api.chat_completions import chat_completions_router
from prefixkv.api.completions import completions_router
from prefixkv.api.engine_interface import ServingEngine
from prefixkv.api.errors import UnexpectedErrors, handle_error, handle_http_exception
from prefixkv.api.explain import explain_router
from prefixkv.api.health import health_router
from prefixkv.api.models import models_router
from prefixkv.api.openapi import describe_api
from prefixkv.api.request_id import RequestIds
from prefixkv.api.responses import responses_router
from prefixkv.api.service import Service
from prefixkv.api.token_memory import TOKEN_MEMORY_BYTES, TokenMemory
from prefixkv.api.tokenization import tokenization_router
from prefixkv.errors import PrefixKVError

MAX_BODY_BYTES = 32 * 2**20


def create_app(
    engine: ServingEngine,
    served_model_names: Sequence[str],
    *,
    max_body_bytes: int = MAX_BODY_BYTES,
    token_memory_bytes: int = TOKEN_MEMORY_BYTES,
) -> FastAPI:
    """Return an ASGI application that serves `engine` in the shapes of OpenAI's API.

    Its lifespan starts the engine unless it runs already, and stops it at the end.

    Args:
        engine: started by the application, or before.
        served_model_names: names that clients may ask for; the first is the default.
        max_body_bytes: larger request bodies are refused with 413 while they arrive.
        token_memory_bytes: for answers as ids, which the next turn of a chat takes up; 0 for none.

    Raises:
        ConfigError: there is no name, or an empty one.
    """
    service = Service(
        engine=engine,
        served_model_names=tuple(dict.fromkeys(served_model_names)),
        max_body_bytes=max_body_bytes,
        token_memory=TokenMemory(token_memory_bytes),
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
    describe_api(app)
    app.include_router(completions_router(service))
    app.include_router(chat_completions_router(service))
    app.include_router(responses_router(service))
    app.include_router(models_router(service))
    app.include_router(tokenization_router(service))
    app.include_router(health_router(service))
    app.include_router(explain_router(service))
    for kind in (PrefixKVError, ClientDisconnect):
        app.add_exception_handler(kind, handle_error)
    app.add_exception_handler(HTTPException, handle_http_exception)
    app.add_middleware(UnexpectedErrors)
    app.add_middleware(RequestIds)
    return app
