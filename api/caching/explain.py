"""GET /v1/prefixkv/explain/{request_id}: why a prompt was not found in the cache."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from prefixkv.api.access.tenant import tenant_of
from prefixkv.api.errors import UnknownRequest
from prefixkv.api.replies.bodies import json_response
from prefixkv.api.service import Service


def explain_router(service: Service) -> APIRouter:
    """Return the route that explains finished requests over `service`."""
    router = APIRouter()

    @router.get("/v1/prefixkv/explain/{request_id:path}", response_model=None)
    async def explain(request: Request, request_id: str) -> Response:
        """Tell what was reused of each prompt of a request, and why no more."""
        found = service.explanations.find(tenant_of(request), request_id)
        if found is None:
            # another tenant's request is no different from one that never was
            raise UnknownRequest(
                f"No request {request_id[:200]!r} is remembered; it must have ended, and not long "
                "ago.",
                "request_id",
            )
        tokenizer = service.engine.tokenizer
        prompts = [told.body(tokenizer) for told in found]
        return json_response({"id": request_id, "object": "cache_report", "prompts": prompts})

    return router
