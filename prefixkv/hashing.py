"""Digests of chains: they find a candidate, and prove nothing.

A block's digest is `xxh3_128(parent's digest + its tokens)`; the root's is cut from the SHA-256 of
its identity. A match compares tokens and parent as well, so a collision costs reuse, never
correctness; hence a fast digest will do.
"""

import hashlib
from array import array
from collections.abc import Callable, Sequence

import xxhash

from prefixkv.errors import InvalidRequest

DigestFunction = Callable[[bytes], bytes]
Tokens = bytes | Sequence[int]
"""Token ids, or the same packed as little-endian int32."""

TOKEN_BYTES = 4

chain_digest: DigestFunction = xxhash.xxh3_128_digest


def root_digest(canonical_identity: bytes) -> bytes:
    """Return the 16-byte digest under which the chains of an identity begin."""
    return hashlib.sha256(canonical_identity).digest()[:16]


def pack_tokens(tokens: Tokens) -> bytes:
    """Pack token ids as int32, 4 bytes a token; bytes are taken as packed already.

    Raises:
        InvalidRequest: if an id is not an integer in [0, 2**31).
    """
    if isinstance(tokens, bytes):
        if len(tokens) % TOKEN_BYTES:
            raise InvalidRequest(
                f"{len(tokens)} bytes are not packed tokens of {TOKEN_BYTES} bytes"
            )
        return tokens
    if isinstance(tokens, array) and tokens.typecode == "i":
        packed = tokens.tobytes()
    else:
        try:
            packed = array("I", tokens).tobytes()  # three times as fast as "i"
        except (OverflowError, TypeError) as error:
            raise InvalidRequest(f"token ids must be integers in [0, 2**31): {error}") from None
    if not packed[3::4].isascii():  # a sign bit is set
        raise InvalidRequest("token ids must be integers in [0, 2**31)")
    return packed


def unpack_tokens(packed: bytes) -> list[int]:
    """Return the ids that `pack_tokens` packed."""
    return array("i", packed).tolist()
