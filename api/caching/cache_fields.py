"""Fields of a request that say how it uses the cache, as OpenAI, Anthropic and vLLM spell them."""

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict

DEFAULT_TTL_S = 1800.0
"""OpenAI's own default, 30m."""

CacheMode = Literal["implicit", "explicit"]

_LONGEST_S = 1e9  # whatever a number can be; the engine has a maximum of its own
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*([smhd]?)", re.ASCII | re.IGNORECASE)
_UNIT_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}


def ttl_seconds(ttl: Any) -> float | None:
    """Return what "90s", "5m", "12h", "1d" or a number of seconds means.

    What cannot be read means the default: a lifetime is a wish, and no reason to refuse.

    Raises:
        ValueError: neither a string nor a number.
    """
    if ttl is None:
        return None
    if isinstance(ttl, str):
        found = _DURATION.fullmatch(ttl.strip())
        ttl = float(found[1]) * _UNIT_S[found[2].lower()] if found else 0
    if isinstance(ttl, bool) or not isinstance(ttl, int | float):
        raise ValueError('a ttl is a string such as "30m" or a number of seconds')
    return float(min(ttl, _LONGEST_S)) if ttl > 0 else DEFAULT_TTL_S


Ttl = Annotated[float | None, BeforeValidator(ttl_seconds)]
"""In seconds once it is read."""


class PromptCacheOptions(BaseModel):
    """OpenAI's options of prompt caching; `comparison_response_id` is taken and not used."""

    model_config = ConfigDict(strict=True)

    mode: CacheMode | None = None
    ttl: Ttl = None
    prewarm: bool | None = None
    comparison_response_id: str | None = None


class CacheMark(BaseModel):
    """A breakpoint on a part of a message: OpenAI's has a mode, Anthropic's `cache_control` a type.

    Which of the two names it came under makes no difference.
    """

    model_config = ConfigDict(strict=True)

    mode: Literal["explicit"] | None = None
    type: Literal["ephemeral"] | None = None
    ttl: Ttl = None


class CacheFields(BaseModel):
    """What every kind of request may say of the cache."""

    prompt_cache_key: str | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: str | None = None
    session_id: str | None = None
    kv_hints: Any = None
    return_cache_report: bool | None = None

    @property
    def cache_mode(self) -> CacheMode:
        """Whether all is cached, or only what breakpoints mark."""
        options = self.prompt_cache_options
        return (options.mode if options is not None else None) or "implicit"

    @property
    def asked_ttl_s(self) -> float | None:
        """The lifetime that the options ask for; None where they ask for none."""
        options = self.prompt_cache_options
        return options.ttl if options is not None else None

    @property
    def ttl_s(self) -> float:
        """The lifetime of breakpoints that name none of their own."""
        return self.asked_ttl_s or ttl_seconds(self.prompt_cache_retention) or DEFAULT_TTL_S

    @property
    def is_prewarm(self) -> bool:
        """Whether the prompt is only to be computed, and nothing said."""
        options = self.prompt_cache_options
        return options is not None and bool(options.prewarm)
