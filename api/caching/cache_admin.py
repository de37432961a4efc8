"""POST /reset_prefix_cache: vLLM's route, for the holder of the admin key."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from prefixkv.api.access.api_keys import ApiKeys
from prefixkv.api.access.tenant import ANONYMOUS, tenant_of
from prefixkv.api.errors import AdminKeyRequired, InvalidApiKey
from prefixkv.api.replies.bodies import json_response
from prefixkv.api.service import Service


def cache_admin_router(service: Service, keys: ApiKeys) -> APIRouter:
    """Return the routes with which an operator changes the cache."""
    router = APIRouter()

    @router.post("/reset_prefix_cache", response_model=None)
    async def reset_prefix_cache(request: Request) -> Response:
        """Forget all that is cached or held, of every tenant; running requests go on."""
        require_admin(request, keys)
        await service.engine.reset_prefix_cache()
        return json_response({"success": True})

    return router


def require_admin(request: Request, keys: ApiKeys) -> None:
    """Let only the holder of the admin key pass.

    Raises:
        InvalidApiKey: no key that the server knows was shown, and an admin key is one of them.
        AdminKeyRequired: the key is another one, or the server has no admin key.
    """
    tenant = tenant_of(request)
    if tenant.is_admin:
        return
    if not keys.have_admin:
        raise AdminKeyRequired("This route is off; the option --admin-api-key turns it on.")
    if tenant == ANONYMOUS:
        raise InvalidApiKey("This route needs the admin API key.")
    raise AdminKeyRequired("This route needs the admin API key; that of a tenant is not enough.")
