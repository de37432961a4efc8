"""prefixkv: LLM inference around a prefix-sharing, copy-on-write KV cache.

The names that need torch are imported when they are first used: the cache and its types come alone.
"""

import importlib
from typing import TYPE_CHECKING

from prefixkv.config import EngineConfig
from prefixkv.identity import ModelIdentity
from prefixkv.prefix_cache import PrefixCache
from prefixkv.sampling_params import SamplingParams
from prefixkv.sequence import Sequence

if TYPE_CHECKING:
    from prefixkv.async_engine import AsyncEngine
    from prefixkv.engine import Engine
    from prefixkv.llm import LLM
    from prefixkv.model import LanguageModel

__all__ = [
    "LLM",
    "AsyncEngine",
    "Engine",
    "EngineConfig",
    "LanguageModel",
    "ModelIdentity",
    "PrefixCache",
    "SamplingParams",
    "Sequence",
]

_HOMES = {
    "LLM": "prefixkv.llm",
    "AsyncEngine": "prefixkv.async_engine",
    "Engine": "prefixkv.engine",
    "LanguageModel": "prefixkv.model",
}

if not TYPE_CHECKING:  # a type checker that saw it would let any name pass

    def __getattr__(name: str) -> object:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(home), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
