"""Beam search inside the engine: what transformers finds, for P + w(T - 1) tokens."""

import functools
from typing import Any, NamedTuple

import pytest
import torch
from engine_runs import assert_idle, greedy, interrupt, outputs_of
from tiny_models import tiny_engine, tiny_model

from prefixkv.errors import InvalidRequest, RequestTooLarge
from prefixkv.outputs import BranchOutput
from prefixkv.sampling_params import SamplingParams

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17]
T = 9
WIDTHS = [2, 4, 8]
PENALTIES = [0.5, 1.0, 2.0]
STOPPING = [False, True, "never"]


class Beams(NamedTuple):
    """What transformers found, best first."""

    token_ids: list[list[int]]
    scores: list[float]


@functools.cache
def model() -> Any:
    return tiny_model()


@functools.cache
def end_tokens() -> tuple[int, ...]:
    """A token that beams of every width meet after a few steps."""
    return (reference(4, 1.0, False, ()).token_ids[0][3],)


@functools.cache
def reference(width: int, penalty: float, stopping: Any, ends: tuple[int, ...]) -> Beams:
    """What `transformers.generate(num_beams=width)` finds."""
    output = model().generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.int64),
        max_new_tokens=T,
        do_sample=False,
        num_beams=width,
        num_return_sequences=width,
        length_penalty=penalty,
        early_stopping=stopping,
        eos_token_id=list(ends) or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    found = [row[len(PROMPT) :].tolist() for row in output.sequences]
    ended = [[i for i, token in enumerate(ids) if token in ends] for ids in found]
    cut = [ids[: at[0] + 1] if at else ids for ids, at in zip(found, ended, strict=True)]
    return Beams(cut, output.sequences_scores.tolist())


def beams(width: int, **options: Any) -> SamplingParams:
    fields = {"n": width, "use_beam_search": True, "max_tokens": T, "ignore_eos": True}
    return SamplingParams(**{**fields, **options})


def assert_equal(outputs: list[BranchOutput], expected: Beams) -> None:
    assert [output.token_ids for output in outputs] == expected.token_ids
    assert [output.score for output in outputs] == pytest.approx(expected.scores, abs=1e-4)


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("stopping", STOPPING)
@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("width", WIDTHS)
def test_beams_are_those_of_transformers(
    width: int, penalty: float, stopping: Any, ends: bool
) -> None:
    """Token for token and in the same order: cold, warm, preempted, and mixed with others."""
    end = end_tokens() if ends else ()
    expected = reference(width, penalty, stopping, end)
    assert (expected.token_ids != reference(width, penalty, stopping, ()).token_ids) == ends
    params = beams(
        width, length_penalty=penalty, early_stopping=stopping,
        stop_token_ids=end,
    )  # fmt: skip
    engine = tiny_engine(model(), num_blocks=200)
    engine.kv_cache.fill(float("nan"))
    for cached in (0, len(PROMPT) - 1):
        request = engine.add(PROMPT, params)
        assert_equal(outputs_of(engine, request)[0], expected)
        assert request.usage.num_cached_tokens == cached

    request = engine.add(PROMPT, params)
    for _ in range(4):
        engine.step()
    engine.scheduler.preempt_all()
    engine.check_invariants()
    mixed = engine.add([*PROMPT[:7], 3, 4], beams(3))
    others = [engine.add(PROMPT[:i], greedy(6)) for i in (4, 9)]
    assert_equal(outputs_of(engine, request, mixed, *others)[0], expected)
    assert request.usage.num_preemptions == 1


@pytest.mark.parametrize("length", [12, 13])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_search_computes_each_beams_tokens_once(width: int, length: int) -> None:
    """P + w(T - 1) tokens; a copy a beam and step at most, a fork where a beam goes on twice."""
    engine = tiny_engine(model(), num_blocks=200)
    request = engine.add(PROMPT[:length], beams(width))
    outputs_of(engine, request)
    usage = request.usage
    assert usage.num_computed_tokens == engine.num_computed_tokens == length + width * (T - 1)
    assert usage.num_completion_tokens == width * T
    assert width - 1 <= usage.num_forks <= (width - 1) * (T - 1)
    assert 0 < usage.num_copies <= width * (T - 1)
    assert usage.peak_num_blocks <= request.num_blocks_at_most(4)


def test_beams_hold_no_tokens_of_their_own() -> None:
    """Whatever the length, a beam has the prompt, shared, and its last token."""
    engine = tiny_engine(model(), num_blocks=200)
    request = engine.add(PROMPT, beams(4))
    for _ in range(5):
        engine.step()
        assert all(branch.tokens is request.prompt for branch in request.branches)
    assert len(request.branches) == 4
    engine.abort(request.request_id)
    assert_idle(engine)


def test_pruned_beams_are_the_first_to_be_evicted() -> None:
    """Nobody will ask for them; what was cached before stays longer."""
    engine = tiny_engine(model(), num_blocks=200)
    outputs_of(engine, engine.add(PROMPT, beams(8)))
    priorities = [block.priority for block in engine.cache.pool.order]
    assert priorities == sorted(priorities)
    assert priorities[0] == -1


def test_a_width_that_never_fits_is_refused_with_the_arithmetic() -> None:
    """Too few blocks for the worst case, or too few places in a step."""
    engine = tiny_engine(model(), num_blocks=20)
    message = "13 prompt tokens and 9 output tokens in each of 8 beams need 35 blocks of 4 tokens"
    with pytest.raises(RequestTooLarge, match=f"{message}, the pool has 20"):
        engine.add(PROMPT, beams(8))
    engine = tiny_engine(model(), max_num_seqs=4)
    with pytest.raises(RequestTooLarge, match="8 beams step together, 4 branches can at most"):
        engine.add(PROMPT, beams(8))
    assert_idle(engine)


def test_searches_wait_for_each_other_where_the_pool_holds_one() -> None:
    """Room is promised to the end of a search: none is preempted for another."""
    engine = tiny_engine(model(), num_blocks=1 + 3 + 4 * 4)
    requests = [engine.add(PROMPT, beams(4)) for _ in range(3)]
    for outputs in outputs_of(engine, *requests):
        assert_equal(outputs, reference(4, 1.0, False, ()))
    assert engine.scheduler.num_preemptions == 0


@pytest.mark.parametrize(
    "field",
    [
        {"presence_penalty": 1.0}, {"repetition_penalty": 1.5}, {"logit_bias": {5: 1.0}},
        {"bad_words": ("a",)}, {"stop": ("a",)}, {"logprobs": 1}, {"min_tokens": 2},
        {"allowed_token_ids": (5,)},
    ],
)  # fmt: skip
def test_what_a_search_does_not_do_is_refused(field: dict[str, Any]) -> None:
    """By name, before anything runs."""
    engine = tiny_engine(model())
    with pytest.raises(InvalidRequest, match=f"{next(iter(field))} cannot be combined"):
        engine.add(PROMPT, beams(2, **field))


def test_one_sick_beam_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN in one row: one error, nothing held."""
    engine = tiny_engine(model(), num_blocks=200)
    request = engine.add(PROMPT, beams(4))
    forward = engine.model.forward

    def sick(*args: Any) -> torch.Tensor:
        logits = forward(*args).clone()
        if request.branches[0].num_output_tokens == 3:
            logits[2] = float("nan")
        return logits

    monkeypatch.setattr(engine.model, "forward", sick)
    deltas = []
    while engine.has_work:
        deltas += engine.step()
        engine.check_invariants()
    assert [delta.finish_reason for delta in deltas] == ["error"]
    assert_idle(engine)


@pytest.mark.parametrize("moment", range(0, 40, 3))
def test_an_interrupted_search_begins_anew(monkeypatch: pytest.MonkeyPatch, moment: int) -> None:
    """Who goes on from whom is never half done."""
    engine = tiny_engine(model(), num_blocks=200)
    request = engine.add(PROMPT, beams(4))
    scheduler = engine.scheduler
    interrupt(
        monkeypatch, moment,
        (scheduler, "branch_out"), (scheduler, "committed"), (scheduler, "_stop_running"),
        (engine.model, "forward"),
    )  # fmt: skip
    (outputs,) = outputs_of(engine, request)
    assert_equal(outputs, reference(4, 1.0, False, ()))
    assert not request.branches
