"""From the fields of a request to what the engine is asked of the cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from prefixkv.api.caching.breakpoints import Mark
from prefixkv.api.caching.cache_fields import CacheFields
from prefixkv.api.requests.schemas import GenerationRequest
from prefixkv.cache_control import Breakpoint, CacheControl, LeaseOutcome

NOT_IN_THE_PROMPT = "its place is not to be found in the rendered prompt"


@dataclass(frozen=True, slots=True)
class CachePlan:
    """What one prompt asks of the cache.

    Attributes:
        control: for the engine; None where nothing is asked.
        unplaced: breakpoints that the engine never hears of, with `num_tokens` 0.
    """

    control: CacheControl | None = None
    unplaced: tuple[LeaseOutcome, ...] = ()


class CachingJob(Protocol):
    """A request that was checked and tokenised, with one plan for each prompt."""

    @property
    def request(self) -> GenerationRequest:
        """What was asked for."""
        ...

    @property
    def prompts(self) -> Sequence[Sequence[int]]:
        """Token ids."""
        ...

    @property
    def plans(self) -> Sequence[CachePlan]:
        """What is asked of the cache."""
        ...


def cache_plan(
    fields: CacheFields,
    num_prompt_tokens: int,
    marks: Sequence[Mark] = (),
    positions: Sequence[int | None] = (),
) -> CachePlan:
    """Return the plan of a prompt.

    In the implicit mode all is cached, and a `ttl` in the options leases the whole prompt besides
    what is marked; in the explicit mode nothing behind the last breakpoint is cached.

    Args:
        positions: prompt tokens before each of the marks; None for one without a place.
    """
    ttls: dict[int, float] = {}
    unplaced: list[LeaseOutcome] = []
    for mark, position in zip(marks, positions, strict=True):
        ttl_s = mark.ttl_s or fields.ttl_s
        if position:
            ttls[position] = max(ttl_s, ttls.get(position, 0))
        else:
            unplaced.append(LeaseOutcome(0, ttl_s, NOT_IN_THE_PROMPT))
    is_explicit = fields.cache_mode == "explicit"
    if fields.asked_ttl_s is not None and not is_explicit:
        ttls[num_prompt_tokens] = max(fields.asked_ttl_s, ttls.get(num_prompt_tokens, 0))
    breakpoints = tuple(Breakpoint(*item) for item in sorted(ttls.items()))
    control = None
    if breakpoints or is_explicit:
        limit = max(ttls, default=0) if is_explicit else None
        control = CacheControl(breakpoints=breakpoints, write_limit=limit)
    return CachePlan(control, tuple(unplaced))
