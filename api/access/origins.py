"""Origins of web pages that may read answers, as `--allowed-origins` names them."""

import json
from collections.abc import Sequence
from urllib.parse import urlsplit

from prefixkv.errors import ConfigError


def parse_origins(values: Sequence[str]) -> list[str]:
    """Return the origins; `values` are those, or make up a JSON list as vLLM's users write it.

    Raises:
        ConfigError: a value is not an origin, and would never be equal to what a browser sends.
    """
    origins = list(values)
    if values and values[0].startswith("["):
        text = " ".join(values)  # a variable was split at its spaces
        try:
            origins = json.loads(text)
        except ValueError:
            raise ConfigError(f"--allowed-origins is not a JSON list: {text[:200]}") from None
    for origin in origins:
        if origin != "*" and not _is_origin(origin):
            raise ConfigError(
                f"--allowed-origins has {origin!r}; an origin is '*' or like 'https://host:port'"
            )
    return origins


def _is_origin(text: object) -> bool:
    if not isinstance(text, str):
        return False
    parts = urlsplit(text)
    return bool(parts.scheme and parts.netloc) and text == f"{parts.scheme}://{parts.netloc}"
