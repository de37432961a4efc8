"""What a request says in headers for want of a field in its body; a field wins."""

import hashlib

from starlette.requests import Request

from prefixkv.api.requests.schemas import GenerationRequest
from prefixkv.errors import InvalidRequest

SESSION_HEADERS = ("x-session-id", "x-session-affinity")
PRIORITY_HEADER = "x-vllm-priority"
MAX_SESSION_CHARS = 128


def session_of(http_request: Request, request: GenerationRequest) -> str | None:
    """Return the name of the session that a request belongs to, at most `MAX_SESSION_CHARS`."""
    name = request.session_id or next(
        (http_request.headers[name] for name in SESSION_HEADERS if name in http_request.headers),
        None,
    )
    name = name or request.prompt_cache_key
    if name and len(name) > MAX_SESSION_CHARS:
        return hashlib.sha256(name.encode()).hexdigest()
    return name or None


def priority_of(http_request: Request, request: GenerationRequest) -> int:
    """Return the priority of a request, lower is earlier.

    Raises:
        InvalidRequest: the header is no integer.
    """
    if request.priority is not None:
        return request.priority
    value = http_request.headers.get(PRIORITY_HEADER, "0").strip()
    if not value.removeprefix("-").isdecimal() or len(value) > 18:
        raise InvalidRequest(
            f"The header X-Vllm-Priority is {value[:40]!r}; it must be an integer.",
            "X-Vllm-Priority",
        )
    return int(value)
