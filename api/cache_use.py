"""How one HTTP request uses the cache: what the engine is asked, and what the client is told."""

from collections.abc import Sequence
from dataclasses import replace

from starlette.requests import Request

from prefixkv.api.cache_reports import CacheReports
from prefixkv.api.request_headers import session_of
from prefixkv.api.schemas import GenerationRequest
from prefixkv.api.service import Service
from prefixkv.api.tenant import ANONYMOUS, tenant_of
from prefixkv.cache_control import CacheControl, LeaseOutcome


def cache_controls(
    service: Service,
    http_request: Request,
    request: GenerationRequest,
    planned: Sequence[CacheControl | None],
) -> list[CacheControl | None]:
    """Return the controls of each prompt, with what only the HTTP request tells."""
    session = session_of(http_request, request)
    looks = bool(request.return_cache_report) and service.tells_other_salts
    if session is None and not looks:
        return list(planned)
    return [
        replace(control or CacheControl(), session=session, looks_at_other_salts=looks)
        for control in planned
    ]


def cache_reports(
    service: Service,
    http_request: Request,
    request: GenerationRequest,
    prompts: Sequence[Sequence[int]],
    *,
    unplaced: Sequence[LeaseOutcome] = (),
    request_id: str,
) -> CacheReports:
    """Return what makes the members of the answer, and remembers explanations under the id."""
    tenant = tenant_of(http_request)
    return CacheReports(
        request,
        prompts,
        service.engine.tokenizer,
        unplaced=unplaced,
        # keys without a salt share a cache, but need not show each other what they sent
        tells_cached=tenant is ANONYMOUS or tenant.salt_for(request.cache_salt) is not None,
        keep=service.explanations.recorder(tenant, request_id),
    )
