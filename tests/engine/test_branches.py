"""Parallel samples: one prefill, forks that copy at their first write, and exact accounts."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_runs import assert_idle, interrupt, outputs_of
from tiny_models import reference_output, tiny_engine, tiny_model

from prefixkv.engine import Engine
from prefixkv.errors import InvalidRequest
from prefixkv.outputs import BranchOutput, OutputDelta
from prefixkv.request import Request
from prefixkv.sampling_params import SamplingParams

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17]  # 3 blocks of 4, and one token
T = 6


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


def samples(n: int, **options: Any) -> SamplingParams:
    """Draws of T tokens with a fixed seed."""
    return SamplingParams(
        **{"n": n, "temperature": 1.0, "seed": 7, "max_tokens": T, "ignore_eos": True, **options}
    )


def finish(engine: Engine, *requests: Request) -> dict[str, list[BranchOutput]]:
    """Run to the end; outputs by request, by index."""
    ids = [request.request_id for request in requests]
    return dict(zip(ids, outputs_of(engine, *requests), strict=True))


def ids(outputs: list[BranchOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def alone(model: Any, prompt: list[int], index: int) -> list[int]:
    """What a branch draws when it is the only one, computing everything by itself."""
    engine = tiny_engine(model, enable_prefix_caching=False)
    request = engine.add(prompt, samples(1))
    (branch,) = request.branches
    engine.scheduler.waiting.remove(branch)  # its index is part of its rank
    branch.index = index
    engine.scheduler.waiting.add(branch)
    deltas: list[OutputDelta] = []
    while engine.has_work:
        deltas += engine.step()
    return [token for delta in deltas for token in delta.token_ids]


@pytest.mark.parametrize("length", [12, 13, 15, 3])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_each_sample_is_what_it_is_alone_and_costs_its_own_tokens_only(
    model: Any, n: int, length: int
) -> None:
    """P + n(T - 1) tokens computed, no block more after the fork, a copy a branch at most."""
    engine = tiny_engine(model)
    engine.kv_cache.fill(float("nan"))
    prompt = (PROMPT * 2)[:length]
    request = engine.add(prompt, samples(n))
    engine.step()
    held = engine.cache.pool.num_usable - len(engine.cache.pool.free)
    assert len(request.branches) == n
    assert held == -(-length // 4)

    engine = tiny_engine(model)
    request = engine.add(prompt, samples(n))
    outputs = finish(engine, request)[request.request_id]

    assert ids(outputs) == [alone(model, prompt, index) for index in range(n)]
    usage = request.usage
    assert usage.num_computed_tokens == engine.num_computed_tokens == length + n * (T - 1)
    assert usage.num_completion_tokens == n * T
    assert usage.num_cached_tokens == 0
    assert usage.num_forks == n - 1
    shares_a_block = n > 1 and length % 4 > 0
    assert usage.num_copies == (n if shares_a_block else 0)
    assert usage.num_slots_copied == usage.num_copies * (length % 4)
    whole, written = length // 4, length + T - 1
    assert whole + n * (-(-written // 4) - whole) <= usage.peak_num_blocks
    assert usage.peak_num_blocks <= whole + n * (-(-written // 4) - whole) + shares_a_block


def test_sixteen_cold_samples_found_nothing_in_the_cache(model: Any) -> None:
    """What siblings share is no hit; the same request again finds all but one token."""
    engine = tiny_engine(model)
    for cached in (0, len(PROMPT) - 1):
        request = engine.add(PROMPT, samples(16))
        finish(engine, request)
        assert request.usage.num_cached_tokens == cached
    assert engine.scheduler.num_cached_tokens == len(PROMPT) - 1


@pytest.mark.parametrize(
    "limits",
    [
        {"max_num_seqs": 2},  # no place for all
        {"num_blocks": 1 + 5 + 2},  # no room for all
        {"max_num_batched_tokens": 3, "max_prefill_chunk": 2},
        {"block_size": 1},
        {"block_size": 16},
    ],
)
def test_many_samples_run_in_turns(model: Any, limits: dict[str, Any]) -> None:
    """Neither places nor room nor budget for all at once: every sample is the same."""
    engine = tiny_engine(model, **limits)
    request = engine.add(PROMPT, samples(8))
    other = engine.add([*PROMPT[:6], 3], samples(2))
    outputs = finish(engine, request, other)

    assert ids(outputs[request.request_id]) == [alone(model, PROMPT, i) for i in range(8)]
    assert ids(outputs[other.request_id]) == [
        alone(model, [*PROMPT[:6], 3], index) for index in range(2)
    ]


def test_greedy_samples_are_all_alike(model: Any) -> None:
    """They are drawn from one row of logits, and go on equal."""
    engine = tiny_engine(model)
    request = engine.add(PROMPT, samples(3, temperature=0))
    outputs = finish(engine, request)[request.request_id]
    assert ids(outputs) == [reference_output(model, PROMPT, T)] * 3


def test_the_best_are_returned_best_first(model: Any) -> None:
    """By mean log-probability of the model, not of what temperature made of it."""
    engine = tiny_engine(model)
    every = engine.add(PROMPT, samples(6, temperature=1.5, logprobs=0))
    best = engine.add(PROMPT, samples(2, best_of=6, temperature=1.5))
    outputs = finish(engine, every, best)

    def mean(output: BranchOutput) -> float:
        assert output.logprobs is not None
        return sum(token.logprob for token in output.logprobs) / len(output.token_ids)

    ranked = sorted(outputs[every.request_id], key=mean, reverse=True)
    assert ids(outputs[best.request_id]) == ids(ranked[:2])
    assert [output.score for output in outputs[best.request_id]] == pytest.approx(
        [mean(output) for output in ranked[:2]], abs=1e-12
    )
    assert best.usage.num_completion_tokens == 6 * T
    assert outputs[best.request_id][0].logprobs is None


def test_samples_that_end_early_leave_the_others_alone(model: Any) -> None:
    """Branches end at different lengths; the ended ones compute nothing more."""
    free = tiny_engine(model)
    request = free.add(PROMPT, samples(4))
    everything = ids(finish(free, request)[request.request_id])
    stop = everything[1][2]
    expected = [o[: o.index(stop) + 1] if stop in o else o for o in everything]
    engine = tiny_engine(model)
    request = engine.add(PROMPT, samples(4, stop_token_ids=(stop,)))
    outputs = finish(engine, request)[request.request_id]

    assert ids(outputs) == expected
    assert len({len(output) for output in expected}) > 1
    computed = len(PROMPT) + sum(len(output) - 1 for output in expected)
    assert request.usage.num_computed_tokens == computed


def test_what_befalls_one_branch_ends_the_request_and_nothing_else(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN for one of three: one error for all of them, and the neighbour goes on."""
    engine = tiny_engine(model)
    bad = engine.add(PROMPT, samples(3), request_id="bad")
    good = engine.add([9, *PROMPT], samples(2, temperature=0), request_id="good")
    forward = engine.model.forward

    def one_row_of_nan(*args: Any) -> torch.Tensor:
        logits = forward(*args).clone()
        if len(bad.branches) == 3 and bad.branches[1].num_output_tokens == 2:
            logits[1] = float("nan")
        return logits

    monkeypatch.setattr(engine.model, "forward", one_row_of_nan)
    deltas: list[OutputDelta] = []
    while engine.has_work:
        deltas += engine.step()
        engine.check_invariants()
    assert [d.request_id for d in deltas if d.finish_reason == "error"] == ["bad"]
    for index in range(2):
        told = [d for d in deltas if (d.request_id, d.index) == ("good", index)]
        assert [t for d in told for t in d.token_ids] == reference_output(
            model, good.prompt[:].tolist(), T
        )
    assert_idle(engine)


@pytest.mark.parametrize("moment", range(12))
def test_an_interrupt_at_any_moment_loses_no_branch(
    model: Any, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """Also between two forks: the step is taken back, and the next one does the rest."""
    engine = tiny_engine(model)
    request = engine.add(PROMPT, samples(3))
    interrupt(
        monkeypatch, moment,
        (engine.scheduler, "fork"), (engine.scheduler, "committed"), (engine.model, "forward"),
        (engine._sampler, "draw"),
    )  # fmt: skip
    (outputs,) = outputs_of(engine, request)
    assert ids(outputs) == [alone(model, PROMPT, index) for index in range(3)]
    assert request.usage.num_completion_tokens == 3 * T


def test_an_abort_frees_all_branches(model: Any) -> None:
    """At whatever step."""
    for steps in range(T):
        engine = tiny_engine(model)
        request = engine.add(PROMPT, samples(4))
        for _ in range(steps):
            engine.step()
        assert engine.abort(request.request_id)
        assert_idle(engine)


def test_new_weights_and_resets_meet_branches_in_flight(model: Any) -> None:
    """Nothing of the old KV is used: each branch goes on as it would alone."""
    for disturb in ("weights_changed", "reset_prefix_cache"):
        engine = tiny_engine(model)
        request = engine.add(PROMPT, samples(3))
        told: list[OutputDelta] = []
        for _ in range(3):
            told += engine.step()
        getattr(engine, disturb)()
        while engine.has_work:
            told += engine.step()
            engine.check_invariants()
        outputs = [[t for d in told if d.index == i for t in d.token_ids] for i in range(3)]
        assert outputs == [alone(model, PROMPT, index) for index in range(3)]
        assert len(request.branches) == 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"n": 0}, r"n is 0; it must be an integer in \[1, 1024\]"),
        ({"n": 2, "best_of": 1}, r"best_of is 1; it must be an integer in \[n, 1024\]; n is 2"),
        ({"n": True}, "n is True"),
        ({"use_beam_search": True, "best_of": 4}, "best_of is 4; it must be absent, or n"),
        ({"early_stopping": "soon"}, "early_stopping is 'soon'"),
        ({"length_penalty": float("nan")}, "length_penalty is nan"),
    ],
)
def test_wrong_numbers_of_branches_are_refused(wrong: dict[str, Any], message: str) -> None:
    """With the field, its value and what is allowed."""
    with pytest.raises(InvalidRequest, match=message):
        replace(SamplingParams(), **wrong)
