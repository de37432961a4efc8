"""GET /health: whether the engine takes requests. It generates nothing."""

from fastapi import APIRouter
from starlette.responses import Response

from prefixkv.api.responses import json_response
from prefixkv.api.service import Service
from prefixkv.errors import EngineStopped


def health_router(service: Service) -> APIRouter:
    """Return the route that load balancers ask."""
    router = APIRouter()

    @router.get("/health", response_model=None)
    @router.head("/health", response_model=None, include_in_schema=False)
    async def health() -> Response:
        """Answer 200 while the engine runs, else 503."""
        if not service.engine.is_running:
            raise EngineStopped("The engine is not running.")
        return json_response({"status": "ok"})

    return router
