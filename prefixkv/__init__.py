"""prefixkv: LLM inference around a prefix-sharing, copy-on-write KV cache."""

from prefixkv.identity import ModelIdentity
from prefixkv.prefix_cache import PrefixCache
from prefixkv.sequence import Sequence

__all__ = ["ModelIdentity", "PrefixCache", "Sequence"]
