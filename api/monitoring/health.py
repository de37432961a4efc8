"""GET /health: the engine runs; GET /ready: it takes requests; GET /version. None generates."""

from importlib.metadata import version

from fastapi import APIRouter
from starlette.responses import Response

from prefixkv.api.replies.bodies import json_response
from prefixkv.api.service import Service
from prefixkv.errors import EngineStopped


def health_router(service: Service) -> APIRouter:
    """Return the routes that load balancers and operators ask."""
    router = APIRouter()

    @router.get("/health", response_model=None)
    @router.head("/health", response_model=None, include_in_schema=False)
    async def health() -> Response:
        """Answer 200 while the engine runs, also during a drain, else 503."""
        if not service.engine.is_running:
            raise EngineStopped("The engine is not running.")
        return json_response({"status": "ok"})

    @router.get("/ready", response_model=None)
    @router.head("/ready", response_model=None, include_in_schema=False)
    async def ready() -> Response:
        """Answer 200 while new requests are served, else 503."""
        service.drain.require_open()
        return await health()

    @router.get("/version", response_model=None)
    async def tell_version() -> Response:
        """Tell the version of the server."""
        return json_response({"version": version("prefixkv")})

    return router
