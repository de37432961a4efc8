"""What one response tells of the cache, once the engine has reported."""

from collections.abc import Callable, Sequence
from typing import Any

from prefixkv.api.caching.cache_plan import CachingJob
from prefixkv.api.caching.explanations import Explanation, explanation
from prefixkv.api.engine_interface import Tokenizer
from prefixkv.cache_control import CacheReport, LeaseOutcome


class CacheReports:
    """Makes the members of a body that tell of the cache.

    Args:
        tells_cached: whether the client may see tokens of the cache that are not its prompt's.
        keep: is given the explanation of each prompt.
    """

    def __init__(
        self,
        job: CachingJob,
        tokenizer: Tokenizer,
        *,
        tells_cached: bool,
        keep: Callable[[int, Explanation], None],
    ) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._tells_cached = tells_cached
        self._keep = keep

    def members(self, prompt: int, report: CacheReport) -> dict[str, Any]:
        """Return what is told of prompt number `prompt`, perhaps nothing; keep its explanation."""
        job, fields = self._job, self._job.request
        told = explanation(report.miss, job.prompts[prompt], tells_cached=self._tells_cached)
        self._keep(prompt, told)
        members: dict[str, Any] = {}
        outcomes = [*job.plans[prompt].unplaced, *report.leases]
        if outcomes or fields.cache_mode == "explicit":
            breakpoints = [_outcome_body(outcome) for outcome in outcomes]
            members["prompt_cache"] = {"mode": fields.cache_mode, "breakpoints": breakpoints}
        if fields.return_cache_report:
            members["cache_report"] = told.body(self._tokenizer)
        return members

    def all_members(self, reports: Sequence[CacheReport | None]) -> dict[str, Any]:
        """Return what is told of all prompts: of several, a list for each member."""
        told = [self.members(i, report) for i, report in enumerate(reports) if report is not None]
        if len(self._job.prompts) == 1:
            return told[0] if told else {}
        names = dict.fromkeys(name for members in told for name in members)
        return {name: [members.get(name) for members in told] for name in names}


def _outcome_body(outcome: LeaseOutcome) -> dict[str, Any]:
    body = {
        "num_tokens": outcome.num_tokens,
        "ttl_s": outcome.ttl_s,
        "status": "granted" if outcome.refused is None else "refused",
    }
    return body if outcome.refused is None else {**body, "reason": outcome.refused}
