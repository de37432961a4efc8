"""Why the reuse of a prompt stopped where it did.

Told is the first of these that applies:

    disabled         the cache is
    none             all but the last token was found
    evicted, reset   the whole block that comes next was published once, and was given up so
    weights_changed  so was the prompt's first block, under weights of before
    other_salt       another tenant's chain goes on further (only if asked for)
    differs          what is cached goes on, with other tokens than the prompt
    never_computed   nothing of this is known

Only whole blocks have digests, and the memory of them is bounded: what is not known to have been
there counts as never computed. So does a prompt that shares not even its first token with others.
"""

from array import array
from dataclasses import replace
from itertools import islice
from typing import Final

from prefixkv.block import Block, Root, any_child, longest_common_child
from prefixkv.cache_control import Miss, MissReason
from prefixkv.prefix_cache import PrefixCache
from prefixkv.sequence import Sequence

MAX_TOLD_TOKENS: Final = 16
MAX_OTHER_ROOTS: Final = 64


def explain(
    sequence: Sequence, tokens: "array[int]", *, looks_at_other_salts: bool = False
) -> Miss:
    """Say why no more was found of a prompt.

    Costs a digest and two look-ups; with `looks_at_other_salts` up to 64 matches besides.

    Args:
        sequence: what was found of `tokens`; nothing is written behind it.
    """
    cache, found = sequence.cache, sequence.num_tokens
    if not cache.enabled:
        return Miss("disabled", found)
    if found >= len(tokens) - 1:
        return Miss("none", found)
    start = found - found % cache.block_size
    parent = sequence.last_block
    if start < found:
        assert parent.parent is not None
        parent = parent.parent
    chunk = tokens[start : start + cache.block_size].tobytes()
    reason = _why_forgotten(cache, parent, chunk)
    if reason is not None:
        return Miss(reason, found)
    if looks_at_other_salts and _is_found_elsewhere(sequence, tokens):
        return Miss("other_salt", found)
    cached = _what_goes_on(parent, chunk, (found - start) * 4)
    if cached.startswith(tokens[found : found + len(cached) // 4].tobytes()):
        return Miss("never_computed", found)
    return Miss("differs", found, tuple(array("i", cached)))


def _why_forgotten(cache: PrefixCache, parent: Block, chunk: bytes) -> MissReason | None:
    """Why the block of these tokens cannot be found, if it could once."""
    if parent.digest is None or len(chunk) < cache.block_size * 4:
        return None
    digest = cache.digest(parent.digest + chunk)
    if digest in cache.pool.index:
        return None  # it is there, and was of no use; or another is
    forgotten = cache.pool.forgotten
    reason = forgotten.reason(digest)
    if reason is None and isinstance(parent, Root) and parent.key in cache.earlier_roots:
        earlier = cache.digest(cache.earlier_roots[parent.key] + chunk)
        if forgotten.reason(earlier) is not None:
            return "weights_changed"
    return reason


def _is_found_elsewhere(sequence: Sequence, tokens: "array[int]") -> bool:
    """Whether a chain of the same model under another salt goes on further."""
    cache, own = sequence.cache, sequence.root
    packed = tokens.tobytes()
    for root in islice(cache.pool.roots.values(), MAX_OTHER_ROOTS + 1):
        if root is own or own.identity is None or root.identity is None:
            continue
        if replace(root.identity, salt=None) != replace(own.identity, salt=None):
            continue
        if cache.match(root, packed)[1] > sequence.num_tokens:
            return True
    return False


def _what_goes_on(parent: Block, chunk: bytes, num_found: int) -> bytes:
    """Return the cached tokens that follow the first `num_found` bytes of `chunk`, packed."""
    child, shared = longest_common_child(parent, chunk)
    if shared < num_found:
        return b""
    if child is None:
        child = any_child(parent) if parent.depth else None
    cached = child.tokens[num_found:] if child is not None else b""
    while child is not None and len(cached) < MAX_TOLD_TOKENS * 4:
        child = any_child(child)
        cached += child.tokens if child is not None else b""
    return cached[: MAX_TOLD_TOKENS * 4]
