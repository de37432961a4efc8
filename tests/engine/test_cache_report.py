"""What the cache did for a request is told once, with its last delta."""

from functools import cache
from typing import Any

import pytest
from engine_runs import steps
from tiny_models import tiny_engine, tiny_model

from prefixkv.cache_control import Breakpoint, CacheControl, CacheReport, LeaseOutcome, Miss
from prefixkv.outputs import OutputDelta
from prefixkv.sampling_params import SamplingParams

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
CONTROL = CacheControl(breakpoints=(Breakpoint(6, 60), Breakpoint(90, 60)), session="s")
LEASES = (LeaseOutcome(6, 60), LeaseOutcome(90, 60, "90 tokens, 14 are computed"))


@cache
def model() -> Any:
    return tiny_model()


@pytest.mark.parametrize("kind", [{}, {"n": 3}, {"n": 1, "best_of": 2}, {"use_beam_search": True}])
def test_the_last_delta_of_a_request_has_the_report(kind: dict[str, Any]) -> None:
    """Of several branches too, which end at once or one by one, or are told at the end."""
    engine = tiny_engine(model())
    kind = {"n": 2} | kind if "use_beam_search" in kind else kind
    params = SamplingParams(max_tokens=5, ignore_eos=True, **kind)
    for miss in (Miss("never_computed", 0), Miss("none", 9)):
        request = engine.add(PROMPT, params, cache_control=CONTROL)
        deltas = list(steps(engine))
        assert [delta.cache_report for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
        assert deltas[-1].cache_report == CacheReport(miss, LEASES)
        assert request.usage.num_cache_write_tokens == len(PROMPT) - miss.num_cached_tokens
        engine.check_invariants()
    assert len(engine.scheduler.leases) == 1
    assert engine.scheduler.leases.stats.num_renewed == 1
    engine.reset_prefix_cache()
    assert engine.cache.usage == 0


def test_a_request_that_fails_says_why_it_missed_and_leases_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = tiny_engine(model())
    engine.add(PROMPT, SamplingParams(max_tokens=5), cache_control=CONTROL)

    def failing(*_: Any) -> None:
        raise RuntimeError("no")

    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "forward", failing)
        deltas: list[OutputDelta] = engine.step()
    assert [delta.cache_report for delta in deltas] == [CacheReport(Miss("never_computed", 0))]
    assert len(engine.scheduler.leases) == 0
    engine.check_invariants()
    engine.weights_changed()
    engine.add(PROMPT, SamplingParams(max_tokens=1))
    *_, last = steps(engine)
    assert last.cache_report == CacheReport(Miss("never_computed", 0))


def test_what_has_expired_is_not_told_as_leased_while_the_engine_idles() -> None:
    engine = tiny_engine(model())
    engine.add(PROMPT, SamplingParams(max_tokens=1), cache_control=CONTROL)
    list(steps(engine))
    leases = engine.scheduler.leases
    assert engine.stats()["num_leased_blocks"] == leases.num_blocks > 0
    assert engine.stats()["kv_cache_usage"] > 0
    now = leases.clock()
    leases.clock = lambda: now + 60
    stats = engine.stats()
    assert (stats["num_leases"], stats["num_leased_blocks"], stats["kv_cache_usage"]) == (0, 0, 0)
    assert stats["num_expired_leases"] == 1
