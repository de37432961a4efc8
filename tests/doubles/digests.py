"""Digests that an adversary would wish for: each finds candidates that are not what was asked."""

from prefixkv.hashing import DigestFunction, chain_digest, pack_tokens, root_digest
from prefixkv.identity import ModelIdentity

DIGESTS: dict[str, DigestFunction] = {
    "good": chain_digest,
    "constant": lambda data: b"",
    "one bit": lambda data: bytes([chain_digest(data)[0] & 1]),
    "last token": lambda data: data[-4:],
}

Chain = tuple[ModelIdentity, tuple[int, ...]]
"""An identity and a whole number of blocks of tokens."""


class ChosenChains:
    """The good digest, but for one chain, which gets the digest of another.

    The two may belong to different identities: what follows them collides as well.
    """

    def __init__(self, mine: Chain, theirs: Chain, block_size: int) -> None:
        self._alias = {digest_of(mine, block_size): digest_of(theirs, block_size)}

    def __call__(self, data: bytes) -> bytes:
        digest = chain_digest(data)
        return self._alias.get(digest, digest)


def digest_of(chain: Chain, block_size: int) -> bytes:
    """The good digest of a chain under the first weights."""
    identity, tokens = chain
    digest = root_digest(identity.at_epoch(0).canonical)
    for start in range(0, len(tokens), block_size):
        digest = chain_digest(digest + pack_tokens(tokens[start : start + block_size]))
    return digest
