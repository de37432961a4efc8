"""Times of requests, to the number: who waited how long for what."""

from typing import Any

import pytest

from prefixkv.histogram import Histogram, one_two_five
from prefixkv.identity import ModelIdentity
from prefixkv.outputs import FinishReason, OutputDelta
from prefixkv.request import Request
from prefixkv.request_times import RequestTimes
from prefixkv.sampling_params import SamplingParams

MODEL = ModelIdentity(architecture="tiny")


def ask(times: RequestTimes, name: str, *, at: float, **params: Any) -> Request:
    """Let a request of three tokens arrive."""
    request = Request(name, [1, 2, 3], SamplingParams(**params), MODEL, number=0, max_tokens=9)
    times.arrived(request, at)
    return request


def admit(times: RequestTimes, request: Request, *, at: float) -> None:
    """Let the scheduler take it."""
    request.admission = 0
    times.admitted(at)


def told(request: Request, reason: FinishReason | None = None, index: int = 0) -> OutputDelta:
    """One more token of an output."""
    request.usage.num_completion_tokens += 1
    return OutputDelta(request.request_id, "x", (5,), request.usage, reason, index=index)


def sums(times: RequestTimes) -> dict[str, Any]:
    """Sum and count of what was observed."""
    return {
        name: (pytest.approx(histogram.sum), sum(histogram.counts))
        for name, histogram in times.histograms.items()
        if any(histogram.counts)
    }


def test_each_wait_of_a_request_is_counted_once() -> None:
    """From arrival to admission, to the first token, to the last one; 1.5 s apart at the end."""
    times = RequestTimes(100)
    request = ask(times, "a", at=10.0)
    request.usage.num_cached_tokens = 2
    times.stepped(0, [], 10.5)
    admit(times, request, at=11.0)
    times.stepped(1, [told(request)], 13.0)
    times.stepped(1, [told(request)], 13.5)
    times.stepped(1, [told(request, "stop")], 15.0)
    assert sums(times) == {
        "request_queue_time_seconds": (1.0, 1),
        "time_to_first_token_seconds": (3.0, 1),
        "request_prefill_time_seconds": (2.0, 1),
        "inter_token_latency_seconds": (2.0, 2),
        "request_decode_time_seconds": (2.0, 1),
        "request_time_per_output_token_seconds": (1.0, 1),
        "e2e_request_latency_seconds": (5.0, 1),
        "request_prompt_tokens": (3, 1),
        "request_generation_tokens": (3, 1),
        "request_prefill_kv_computed_tokens": (1, 1),
        "request_params_n": (1, 1),
        "iteration_tokens_total": (3, 3),
    }
    assert times.num_finished == {"stop": 1}


def test_outputs_have_gaps_of_their_own_and_end_one_request() -> None:
    """Two outputs that step together: each has its gaps; the request is over with the last."""
    times = RequestTimes(100)
    request = ask(times, "a", at=0.0, n=2)
    admit(times, request, at=0.0)
    times.stepped(3, [told(request), told(request, index=1)], 1.0)
    times.stepped(2, [told(request), told(request, "stop", index=1)], 2.0)
    assert not times.num_finished
    times.stepped(1, [told(request, "length")], 4.0)
    assert times.num_finished == {"length": 1}
    seen = sums(times)
    assert seen["inter_token_latency_seconds"] == (1.0 + 1.0 + 2.0, 3)
    assert seen["request_time_per_output_token_seconds"] == (4.0 / 3, 1)
    assert seen["time_to_first_token_seconds"] == (1.0, 1)


def test_streams_of_a_step_are_counted_together_but_by_how_long_each_waited() -> None:
    """One began later: its gap is shorter."""
    times = RequestTimes(100)
    old, new = ask(times, "a", at=0.0), ask(times, "b", at=0.0)
    times.stepped(1, [told(old)], 1.0)
    times.stepped(1, [told(new)], 3.0)
    times.stepped(2, [told(old), told(new)], 4.0)
    assert sums(times)["inter_token_latency_seconds"] == (3.0 + 1.0, 2)


def test_what_is_ranked_is_told_at_once_and_has_no_times_of_tokens() -> None:
    """Both outputs come with the last step."""
    times = RequestTimes(100)
    request = ask(times, "a", at=0.0, n=2, best_of=3)
    admit(times, request, at=1.0)
    times.stepped(1, [told(request, "stop"), told(request, "length", index=1)], 5.0)
    seen = sums(times)
    assert seen["e2e_request_latency_seconds"] == seen["time_to_first_token_seconds"] == (5.0, 1)
    assert not {name for name in seen if "decode" in name or "prefill_time" in name}
    assert not {"inter_token_latency_seconds", "request_time_per_output_token_seconds"} & set(seen)


def test_what_fails_or_is_given_up_is_no_sample_of_speed() -> None:
    """It counts by its reason alone, and nothing is kept of it."""
    times = RequestTimes(100)
    failed, left = ask(times, "a", at=0.0, n=2), ask(times, "b", at=0.0)
    times.stepped(1, [told(failed, "error")], 1.0)
    times.aborted(left.request_id)
    times.stepped(1, [told(failed), told(left)], 2.0)
    assert times.num_finished == {"error": 1, "abort": 1}
    assert "e2e_request_latency_seconds" not in sums(times)
    assert sums(times)["time_to_first_token_seconds"] == (1.0, 1)


def test_bounds_are_inclusive_and_what_is_beyond_counts() -> None:
    """As Prometheus has it; a copy stands still."""
    histogram = Histogram([1, 2])
    for value in (0.5, 1, 1.5, 2):
        histogram.observe(value)
    copied = histogram.copy()
    histogram.observe(3, times=4)
    assert (histogram.counts, histogram.sum) == ([2, 2, 4], 17)
    assert (copied.counts, copied.sum) == ([2, 2, 0], 5)
    assert one_two_five(50) == [1, 2, 5, 10, 20, 50]
    assert one_two_five(49) == [1, 2, 5, 10, 20]
