"""What a request asks of the cache besides being matched, and what the cache says of it."""

import math
from dataclasses import dataclass
from typing import Literal

from prefixkv.errors import InvalidRequest

MissReason = Literal[
    "none",
    "disabled",
    "never_computed",
    "differs",
    "evicted",
    "reset",
    "weights_changed",
    "other_salt",
]
"""Why a prompt's first token that was not found was not: "none" where all was found that can be.

Where several apply, `miss.py` says which is told.
"""

MAX_BREAKPOINTS = 4
"""Breakpoints of one request that are leased; the longest are."""


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """The end of a prefix of the prompt that is to stay findable: a lease on its chain.

    Args:
        num_tokens: of the prompt, from its start; need not end a block.
        ttl_s: how long at least, from when the request's first branch ends.

    Raises:
        InvalidRequest: if either is not positive, or `ttl_s` is not finite.
    """

    num_tokens: int
    ttl_s: float

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise InvalidRequest(f"a breakpoint after {self.num_tokens} tokens", "cache_control")
        if not (math.isfinite(self.ttl_s) and self.ttl_s > 0):
            raise InvalidRequest(f"a breakpoint for {self.ttl_s} seconds", "cache_control")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheControl:
    """How one request uses the cache.

    Args:
        breakpoints: shortest first.
        write_limit: tokens of its sequences, at most, that other requests may find; None for all.
        session: a name; a session that goes on gives up its leases that the new ones cover or
            replace. Names of different identities have nothing to do with each other.
        looks_at_other_salts: whether a miss may be told as "other_salt". That tells of what other
            tenants sent, so it is for operators only.

    Raises:
        InvalidRequest: if breakpoints do not stand shortest first, or `write_limit` is negative.
    """

    breakpoints: tuple[Breakpoint, ...] = ()
    write_limit: int | None = None
    session: str | None = None
    looks_at_other_salts: bool = False

    def __post_init__(self) -> None:
        lengths = [point.num_tokens for point in self.breakpoints]
        if lengths != sorted(lengths):
            raise InvalidRequest(f"breakpoints after {lengths} tokens: shortest first")
        if self.write_limit is not None and self.write_limit < 0:
            raise InvalidRequest(f"write_limit is {self.write_limit}", "cache_control")


@dataclass(frozen=True, slots=True)
class Miss:
    """Why the reuse of a prompt stopped where it did, as seen at the first admission.

    Attributes:
        num_cached_tokens: prompt tokens found, as in `Usage`.
        cached_token_ids: what stands in the cache from there on, at most 16 tokens, where the
            prompt goes on differently ("differs"); of the same identity, salt included.
    """

    reason: MissReason
    num_cached_tokens: int
    cached_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LeaseOutcome:
    """What became of a breakpoint: `refused` says why, and is None for one that was granted.

    `ttl_s` is what was applied: what was asked for, or the most that is allowed.
    """

    num_tokens: int
    ttl_s: float
    refused: str | None = None


@dataclass(frozen=True, slots=True)
class CacheReport:
    """What the cache did for a request; told with its last delta."""

    miss: Miss
    leases: tuple[LeaseOutcome, ...] = ()
