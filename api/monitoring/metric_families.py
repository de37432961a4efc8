"""What `/metrics` tells, by name: as vLLM calls it where vLLM has it, and what only we have."""

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import NamedTuple, get_args

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from prefixkv.engine_stats import EngineStats, ServingStats
from prefixkv.histogram import Histogram
from prefixkv.outputs import FinishReason

PREFIX = "prefixkv:"


Numbers = float | Mapping[str, float]
"""One number, or several by the value of a label."""


class Reading(NamedTuple):
    """What a metric means, and where the engine has it; `label` tells several numbers apart."""

    meaning: str
    read: Callable[[EngineStats], Numbers]
    label: str = ""


GAUGES = {
    "num_requests_running": Reading(
        "Branches that run: an output of a request each, or a beam.",
        lambda stats: stats.num_requests_running,
    ),
    "num_requests_waiting": Reading(
        "Branches that wait.", lambda stats: stats.num_requests_waiting
    ),
    "num_requests_waiting_by_reason": Reading(
        "Branches that wait: for room, or for another one's prefill.",
        lambda stats: {
            "capacity": stats.num_requests_waiting - stats.num_requests_deferred,
            "deferred": stats.num_requests_deferred,
        },
        "reason",
    ),
    "kv_cache_usage_perc": Reading(
        "Share of the blocks that cannot be had by evicting, from 0 to 1.",
        lambda stats: stats.kv_cache_usage,
    ),
    "live_branches": Reading(
        "Branches that hold blocks: they run, or are held.", lambda stats: stats.num_live_branches
    ),
    "held_branches": Reading(
        "Branches that are held for somebody to go on from.", lambda stats: stats.num_branches_held
    ),
    "leases": Reading("Prefixes under a lease.", lambda stats: stats.num_leases),
    "leased_blocks": Reading(
        "Blocks under leases, each counted once.", lambda stats: stats.num_leased_blocks
    ),
    "block_refs": Reading(
        "Blocks of all live branches, a shared one counted for each of them.",
        lambda stats: stats.num_block_references,
    ),
    "blocks_used": Reading(
        "Blocks of all live branches, each counted once.", lambda stats: stats.num_blocks_used
    ),
    "shared_blocks": Reading(
        "Blocks that several live branches have.", lambda stats: stats.num_shared_blocks
    ),
    "sharing_ratio": Reading(
        "block_refs by blocks_used; 1 where nothing is shared.",
        lambda stats: stats.num_block_references / (stats.num_blocks_used or 1) or 1,
    ),
}

COUNTERS = {
    "prefix_cache_queries": Reading(
        "Prompt tokens that were looked for in the cache.",
        lambda stats: stats.num_queried_tokens,
    ),
    "prefix_cache_hits": Reading(
        "Prompt tokens that were found in the cache.", lambda stats: stats.num_cached_tokens
    ),
    "prompt_tokens": Reading(
        "Prompt tokens of admitted requests.", lambda stats: stats.num_prompt_tokens
    ),
    "prompt_tokens_cached": Reading(
        "Those of them that were found in the cache.", lambda stats: stats.num_cached_tokens
    ),
    "prompt_tokens_by_source": Reading(
        "Prompt tokens of admitted requests, by where their KV is from.",
        lambda stats: {
            "local_compute": stats.num_prompt_tokens - stats.num_cached_tokens,
            "local_cache_hit": stats.num_cached_tokens,
        },
        "source",
    ),
    "prompt_tokens_cached_by_source": Reading(
        "Prompt tokens found in the cache, by tier.",
        lambda stats: {"device": stats.num_cached_tokens},
        "source",
    ),
    "generation_tokens": Reading("Tokens drawn.", lambda stats: stats.num_generated_tokens),
    "num_preemptions": Reading(
        "Times that running work had to give up its blocks.", lambda stats: stats.num_preemptions
    ),
    "cow_copies": Reading(
        "Blocks copied because others have them too.", lambda stats: stats.cache.num_copies
    ),
    "forks": Reading("Branches forked.", lambda stats: stats.cache.num_forks),
    "leases_granted": Reading("Leases granted.", lambda stats: stats.leases.num_granted),
    "leases_renewed": Reading("Leases granted anew.", lambda stats: stats.leases.num_renewed),
    "leases_refused": Reading("Leases refused.", lambda stats: stats.leases.num_refused),
    "leases_expired": Reading("Leases that ran out.", lambda stats: stats.leases.num_expired),
    "leases_given_up": Reading(
        "Leases given up since nothing else was left.", lambda stats: stats.leases.num_given_up
    ),
    "miss_reason": Reading(
        "Requests by why the reuse of their prompt stopped where it did.",
        lambda stats: {str(reason): count for reason, count in stats.misses.items()},
        "reason",
    ),
    "evicted_blocks": Reading(
        "Blocks whose content was given up for other content.",
        lambda stats: stats.num_evicted_blocks,
    ),
}

HISTOGRAMS = {
    "time_to_first_token_seconds": "From the arrival of a request to its first token.",
    "inter_token_latency_seconds": "From a token of an output to its next.",
    "request_time_per_output_token_seconds": "Mean of the same, of a finished request.",
    "e2e_request_latency_seconds": "From the arrival of a request to its last token.",
    "request_queue_time_seconds": "From the arrival of a request to its admission.",
    "request_prefill_time_seconds": "From the admission of a request to its first token.",
    "request_decode_time_seconds": "From the first token of a request to its last.",
    "request_prompt_tokens": "Prompt tokens of a finished request.",
    "request_generation_tokens": "Tokens drawn for a finished request, all outputs together.",
    "request_prefill_kv_computed_tokens": "Prompt tokens that were not found in the cache.",
    "request_params_n": "Outputs that a finished request asked for.",
    "iteration_tokens_total": "Tokens computed in a step.",
}


class Families:
    """Makes metric families; all samples have the model's name and the engine's number."""

    def __init__(self, model_name: str) -> None:
        self._names, self._values = ["model_name", "engine"], [model_name, "0"]

    def of_engine(self, stats: ServingStats) -> Iterator[Metric]:
        """Yield what the engine counts."""
        for name, (meaning, read, label) in GAUGES.items():
            yield self.gauge(name, meaning, read(stats.engine), label)
        for name, (meaning, read, label) in COUNTERS.items():
            yield self.counter(name, meaning, read(stats.engine), label)
        for name, meaning in HISTOGRAMS.items():
            yield self._histogram(name, meaning, stats.histograms[name])
        meaning = "Requests that are over, by why."
        finished = dict.fromkeys(get_args(FinishReason), 0) | dict(stats.num_finished)
        yield self.counter("request_success", meaning, finished, "finished_reason")
        names, values = self._names + list(stats.config), self._values + list(stats.config.values())
        info = GaugeMetricFamily(PREFIX + "cache_config_info", "The cache.", labels=names)
        info.add_metric(values, 1)
        yield info

    def gauge(self, name: str, meaning: str, numbers: Numbers, label: str = "") -> Metric:
        """Return what stands at a number."""
        return self._filled(GaugeMetricFamily, name, meaning, numbers, label)

    def counter(self, name: str, meaning: str, numbers: Numbers, label: str = "") -> Metric:
        """Return what only grows; its samples end in `_total`."""
        return self._filled(CounterMetricFamily, name, meaning, numbers, label)

    def _filled(
        self,
        family: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        meaning: str,
        numbers: Numbers,
        label: str,
    ) -> Metric:
        if not isinstance(numbers, Mapping):
            made = family(PREFIX + name, meaning, labels=self._names)
            made.add_metric(self._values, numbers)
            return made
        made = family(PREFIX + name, meaning, labels=[*self._names, label])
        for value, number in numbers.items():
            made.add_metric([*self._values, value], number)
        return made

    def _histogram(self, name: str, meaning: str, histogram: Histogram) -> Metric:
        made = HistogramMetricFamily(PREFIX + name, meaning, labels=self._names)
        bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
        buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
        made.add_metric(self._values, buckets, histogram.sum)
        return made
