"""Why a prompt was not found in the cache, as told to the client, and a memory of it."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from prefixkv.api.access.tenant import Tenant
from prefixkv.api.engine_interface import Tokenizer
from prefixkv.cache_control import Miss, MissReason

NUM_NEIGHBOURS = 8
"""Tokens shown on each side of where the reuse stopped."""

MAX_REQUESTS = 512
"""Of one tenant that are remembered."""

MAX_PROMPTS = 16
"""Of one request that are remembered, the first that end."""

_ID_PREFIXES = ("chatcmpl-", "cmpl-", "resp_")


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why the reuse of one prompt stopped where it did; of the prompt, only what is near that.

    Attributes:
        position: of the first token that was not reused, or that differs from the cached one.
        cached: tokens that stand in the cache from there on; none where that is not to be told.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    reason: MissReason
    position: int
    before: tuple[int, ...]
    behind: tuple[int, ...]
    cached: tuple[int, ...]

    def body(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """Return it for JSON, with tokens as text, special ones spelled out."""

        def text(token_ids: Sequence[int]) -> str | None:
            return tokenizer.decode(token_ids, skip_special_tokens=False) if token_ids else None

        return {
            "reason": self.reason,
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": self.num_cached_tokens,
            "position": self.position,
            "before": text(self.before),
            "prompt_token": text(self.behind[:1]),
            "prompt": text(self.behind),
            "cached_token": text(self.cached[:1]),
            "cached": text(self.cached),
        }


def explanation(miss: Miss, prompt: Sequence[int], *, tells_cached: bool) -> Explanation:
    """Return what explains `miss`; without `tells_cached` nothing that others may have sent."""
    rest = prompt[miss.num_cached_tokens : miss.num_cached_tokens + len(miss.cached_token_ids)]
    pairs = zip(rest, miss.cached_token_ids, strict=False)
    num_alike = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), 0)
    position = miss.num_cached_tokens + num_alike
    cached = miss.cached_token_ids[num_alike : num_alike + NUM_NEIGHBOURS]
    return Explanation(
        num_prompt_tokens=len(prompt),
        num_cached_tokens=miss.num_cached_tokens,
        reason=miss.reason,
        position=position,
        before=tuple(prompt[max(0, position - NUM_NEIGHBOURS) : position]),
        behind=tuple(prompt[position : position + NUM_NEIGHBOURS]),
        cached=cached if tells_cached else (),
    )


class Explanations:
    """The explanations of each tenant's last requests; no tenant sees or displaces another's."""

    def __init__(self) -> None:
        self._by_tenant: dict[str, OrderedDict[str, dict[int, Explanation]]] = {}

    def recorder(self, tenant: Tenant, request_id: str) -> Callable[[int, Explanation], None]:
        """Return what remembers the explanation of each prompt of a request, by its number.

        With the first of them an older request of the same id is forgotten.
        """
        requests = self._by_tenant.setdefault(tenant.name, OrderedDict())
        prompts: dict[int, Explanation] = {}

        def remember(prompt: int, told: Explanation) -> None:
            if len(prompts) < MAX_PROMPTS:
                prompts[prompt] = told
            requests[request_id] = prompts
            requests.move_to_end(request_id)
            if len(requests) > MAX_REQUESTS:
                requests.popitem(last=False)

        return remember

    def find(self, tenant: Tenant, request_id: str) -> list[Explanation] | None:
        """Return one explanation for each prompt of a request, by its id or its response's.

        None if this tenant made no such request, or too many since.
        """
        requests = self._by_tenant.get(tenant.name, OrderedDict())
        names = [request_id, *(request_id.removeprefix(prefix) for prefix in _ID_PREFIXES)]
        found = next((requests[name] for name in names if name in requests), None)
        # taken at once, as long answers are told from other threads
        return [told for _, told in sorted(tuple(found.items()))] if found is not None else None
