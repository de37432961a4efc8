"""GET /v1/models and /v1/models/{id}."""

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from prefixkv.api.replies.bodies import json_response
from prefixkv.api.service import Service


def models_router(service: Service) -> APIRouter:
    """Return the routes that name the served models."""
    router = APIRouter()

    @router.get("/v1/models", response_model=None)
    async def list_models() -> Response:
        """List every name under which the model is served."""
        cards = [_card(service, name) for name in service.served_model_names]
        return json_response({"object": "list", "data": cards})

    # names like `org/model` have slashes
    @router.get("/v1/models/{model_id:path}", response_model=None)
    async def retrieve_model(model_id: str) -> Response:
        """Describe one served model."""
        return json_response(_card(service, service.resolve_model(model_id)))

    return router


def _card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "prefixkv",
        "root": service.served_model_names[0],
        "parent": None,
        "max_model_len": service.engine.max_model_len,
    }
