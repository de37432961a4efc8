"""How one HTTP request uses the cache: what the engine is asked, and what the client is told."""

from dataclasses import replace

from starlette.requests import Request

from prefixkv.api.access.tenant import tenant_of
from prefixkv.api.caching.cache_plan import CachingJob
from prefixkv.api.caching.cache_reports import CacheReports
from prefixkv.api.requests.request_headers import session_of
from prefixkv.api.service import Service
from prefixkv.cache_control import CacheControl


def cache_controls(
    service: Service, http_request: Request, job: CachingJob
) -> list[CacheControl | None]:
    """Return the controls of each prompt, with what only the HTTP request tells."""
    session = session_of(http_request, job.request)
    may_look = service.tells_other_salts or tenant_of(http_request).is_admin
    looks = bool(job.request.return_cache_report) and may_look
    controls = [plan.control for plan in job.plans]
    if session is None and not looks:
        return controls
    return [
        replace(control or CacheControl(), session=session, looks_at_other_salts=looks)
        for control in controls
    ]


def cache_reports(
    service: Service, http_request: Request, job: CachingJob, request_id: str
) -> CacheReports:
    """Return what makes the members of the answer, and remembers explanations under the id."""
    tenant = tenant_of(http_request)
    is_salted = tenant.salt_for(job.request.cache_salt) is not None
    return CacheReports(
        job,
        service.engine.tokenizer,
        tells_cached=is_salted or service.shows_shared_text,
        keep=service.explanations.recorder(tenant, request_id),
    )
