"""Which route a request means, for middleware, which runs before routing."""

from starlette.types import Scope

GENERATION_PATHS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses"})
"""POST to one of these makes the engine generate."""


def route_path(scope: Scope) -> str:
    """Return the path below the prefix under which a proxy publishes the application."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


def is_generation(scope: Scope) -> bool:
    """Return whether the request asks the engine to generate."""
    return (
        scope["type"] == "http"
        and scope["method"] == "POST"
        and route_path(scope) in GENERATION_PATHS
    )
