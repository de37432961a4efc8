"""Log-probabilities of prompts: equal to a whole forward pass, cold or warm, and computed once."""

import random
from functools import cache
from typing import Any

import pytest
import torch
from engine_runs import assert_idle, greedy, interrupt, outputs_of, poison
from tiny_models import tiny_engine, tiny_model

from prefixkv.engine import Engine
from prefixkv.errors import InvalidRequest
from prefixkv.llm import LLM
from prefixkv.outputs import OutputDelta, PromptLogprob
from prefixkv.request import Request
from prefixkv.sampling_params import SamplingParams

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18]  # 3 blocks of 4, and 2 tokens


@cache
def model() -> Any:
    return tiny_model()


@cache
def whole(prompt: tuple[int, ...]) -> torch.Tensor:
    """Log-probabilities [len(prompt), vocab_size] of one pass without any cache."""
    with torch.no_grad():
        return torch.as_tensor(model()(torch.tensor([prompt])).logits[0].log_softmax(dim=-1))


def scoring(num_top: int = 0, **options: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0, "max_tokens": 2, "prompt_logprobs": num_top, **options}
    )


def ask(engine: Engine, prompt: list[int], num_top: int = 0, **options: Any) -> Request:
    return engine.add(prompt, scoring(num_top, **options))


def told(engine: Engine, *requests: Request) -> list[tuple[PromptLogprob, ...]]:
    """Run to the end; of each request what its deltas tell of the prompt, which they do once."""
    found: dict[str, list[tuple[PromptLogprob, ...]]] = {r.request_id: [] for r in requests}
    while engine.has_work:
        poison(engine, float("nan"))
        for delta in engine.step():
            assert delta.error is None
            if delta.prompt_logprobs is not None:
                found[delta.request_id].append(delta.prompt_logprobs)
        engine.check_invariants()
    assert_idle(engine)
    assert all(len(values) == 1 for values in found.values())
    return [values[0] for values in found.values()]


def check(prompt: list[int], values: tuple[PromptLogprob, ...], num_top: int = 0) -> None:
    """As a whole pass has them."""
    assert len(values) == len(prompt)
    assert values[0] is None
    expected = whole(tuple(prompt))
    for position, value in enumerate(values[1:], start=1):
        assert value is not None
        row = expected[position - 1]
        assert value.token_id == prompt[position]
        assert value.logprob == pytest.approx(float(row[prompt[position]]), abs=1e-9)
        assert value.rank == int((row > row[prompt[position]]).sum()) + 1
        top = row.topk(num_top) if num_top else None
        assert [i for i, _ in value.top[:num_top]] == (top.indices.tolist() if top else [])
        if top:
            assert [p for _, p in value.top[:num_top]] == pytest.approx(top.values.tolist())


@pytest.mark.parametrize("options", [{}, {"max_prefill_chunk": 1}, {"max_prefill_chunk": 5}])
@pytest.mark.parametrize("length", [1, 2, 4, 5, 14])
def test_cold_values_are_those_of_a_whole_pass(length: int, options: dict[str, Any]) -> None:
    engine = tiny_engine(model(), **options)
    request = ask(engine, PROMPT[:length], 3)
    check(PROMPT[:length], told(engine, request)[0], 3)
    assert request.usage.num_computed_tokens == length + 1


@pytest.mark.parametrize("length", [2, 4, 5, 8, 9, 14])
def test_a_resend_finds_its_values_and_computes_one_token(length: int) -> None:
    engine = tiny_engine(model())
    cold = told(engine, ask(engine, PROMPT[:length], 2))[0]
    request = ask(engine, PROMPT[:length], 2)
    assert told(engine, request)[0] == cold  # the very same: nothing was computed again
    assert request.usage.num_computed_tokens == 1 + 1
    assert request.usage.num_cached_tokens == length - 1


def test_a_longer_prompt_computes_from_one_token_before_the_first_without_a_value() -> None:
    engine = tiny_engine(model())
    told(engine, ask(engine, PROMPT[:10]))
    request = ask(engine, PROMPT)
    check(PROMPT, told(engine, request)[0])
    assert request.usage.num_cached_tokens == 9
    assert request.usage.num_computed_tokens == 14 - 9 + 1


def test_choices_behind_a_context_share_it() -> None:
    """Each computes the context's last token, whose row its own first token is scored by, and
    itself."""
    engine = tiny_engine(model())
    told(engine, ask(engine, [*PROMPT, 20], max_tokens=1))
    requests = [ask(engine, [*PROMPT, last], max_tokens=1) for last in (21, 22, 23)]
    for request, values in zip(requests, told(engine, *requests), strict=True):
        check(request.prompt.tolist(), values)
        assert request.usage.num_computed_tokens == 2


def test_values_are_put_beside_kv_that_others_computed() -> None:
    """K and V alone are no hit; then they are: the blocks stay, and learn the values."""
    engine = tiny_engine(model())
    engine.add(PROMPT, greedy(2))
    outputs_of(engine)
    first, second = ask(engine, PROMPT), ask(engine, PROMPT)
    values = told(engine, first, second)
    check(PROMPT, values[0])
    assert values[1] == values[0]
    assert first.usage.num_computed_tokens == len(PROMPT) + 1
    assert second.usage.num_computed_tokens < 8  # it waited for the blocks of the first
    assert engine.cache.stats.num_deduplicated >= 3
    third = ask(engine, PROMPT)
    assert told(engine, third)[0] == values[0]
    assert third.usage.num_computed_tokens == 1 + 1


def test_more_of_the_likeliest_are_computed_anew_and_fewer_are_not() -> None:
    engine = tiny_engine(model())
    told(engine, ask(engine, PROMPT, 1))
    more = ask(engine, PROMPT, 4)
    check(PROMPT, told(engine, more)[0], 4)
    assert more.usage.num_computed_tokens == len(PROMPT) + 1
    fewer = ask(engine, PROMPT, 2)
    check(PROMPT, told(engine, fewer)[0], 2)
    assert fewer.usage.num_computed_tokens == 1 + 1


def test_a_twin_does_not_wait_for_who_computes_no_values() -> None:
    engine = tiny_engine(model(), max_prefill_chunk=4)
    plain = engine.add(PROMPT, greedy(2))
    engine.step()
    request = ask(engine, PROMPT)
    engine.step()
    assert request.branches[0].sequence is not None
    check(PROMPT, told(engine, request)[0])
    assert plain.usage.num_completion_tokens == 2


def test_rows_of_a_step_are_bounded() -> None:
    """Each takes a row of logits: a long prompt is scored in pieces, others go on beside it."""
    engine = tiny_engine(model())
    engine.scheduler.config = type(engine.scheduler.config)(max_num_scored_tokens=5)
    rows: list[int] = []
    forward = engine.model.forward

    def counting(*args: Any) -> torch.Tensor:
        rows.append(len(args[3]))
        return forward(*args)

    engine.model.forward = counting  # type: ignore[method-assign, assignment]
    long = [random.Random(1).randrange(3, 200) for _ in range(23)]
    requests = [ask(engine, long), ask(engine, PROMPT), ask(engine, PROMPT[3:])]
    engine.add(PROMPT[5:], greedy(8))
    values = told(engine, *requests)
    for request, found in zip(requests, values, strict=True):
        check(request.prompt.tolist(), found)
    assert max(rows) <= 5 + len(requests)


def test_only_who_asks_has_rows_computed() -> None:
    engine = tiny_engine(model())
    forward, rows = engine.model.forward, []

    def counting(*args: Any) -> torch.Tensor:
        rows.append(len(args[3]))
        return forward(*args)

    engine.model.forward = counting  # type: ignore[method-assign, assignment]
    engine.add(PROMPT, greedy(3))
    outputs_of(engine)
    assert rows == [1, 1, 1]


def test_samples_and_ranked_samples_tell_of_the_prompt_once() -> None:
    engine = tiny_engine(model())
    requests = [
        ask(engine, PROMPT, n=3, temperature=1.0, seed=1),
        ask(engine, PROMPT[1:], n=2, best_of=3, temperature=1.0, seed=1),
    ]
    for request, values in zip(requests, told(engine, *requests), strict=True):
        check(request.prompt.tolist(), values)


def test_the_library_hands_them_on() -> None:
    llm = LLM.from_engine(tiny_engine(model()))
    scored, plain = llm.generate([PROMPT, PROMPT], [scoring(1), greedy(1)], use_tqdm=False)
    assert scored.prompt_logprobs is not None
    check(PROMPT, tuple(scored.prompt_logprobs), 1)
    assert plain.prompt_logprobs is None


def test_beams_do_not_score_their_prompt() -> None:
    with pytest.raises(InvalidRequest, match="prompt_logprobs cannot be combined with use_beam"):
        tiny_engine(model()).add(
            PROMPT, SamplingParams(n=2, use_beam_search=True, prompt_logprobs=0)
        )


def test_new_weights_make_new_values() -> None:
    """Also for a request that is half scored, and for one that waits with what it found."""
    engine = tiny_engine(model(), max_prefill_chunk=4, max_num_seqs=1)
    told(engine, ask(engine, PROMPT))
    half, waiting = ask(engine, PROMPT[::-1]), ask(engine, PROMPT)
    engine.step()
    with torch.no_grad():
        for parameter in engine.model.hf.parameters():
            parameter.mul_(0.5)
    engine.weights_changed()
    changed = tiny_engine(engine.model.hf)
    values = told(engine, half, waiting)
    expected = told(changed, *(ask(changed, r.prompt.tolist()) for r in (half, waiting)))
    for found, right in zip(values, expected, strict=True):
        for a, b in zip(found[1:], right[1:], strict=True):
            assert a is not None
            assert b is not None
            assert a.logprob == pytest.approx(b.logprob, abs=1e-9)


def change_weights(engine: Engine) -> None:
    with torch.no_grad():
        for parameter in engine.model.hf.parameters():
            parameter.mul_(0.5)
    engine.weights_changed()


def test_values_of_old_weights_are_not_kept_with_new_blocks() -> None:
    """A request that has told them goes on, and computes its prompt again."""
    engine = tiny_engine(model())
    ask(engine, PROMPT, max_tokens=20, ignore_eos=True)
    engine.step()
    engine.step()
    change_weights(engine)
    engine.step()
    changed = tiny_engine(engine.model.hf)
    request, cold = ask(engine, PROMPT), ask(changed, PROMPT)
    found = [v.logprob for v in told(engine, request)[0] if v]
    assert found == pytest.approx([v.logprob for v in told(changed, cold)[0] if v], abs=1e-9)


def test_ranked_samples_tell_the_values_that_they_began_with() -> None:
    engine = tiny_engine(model())
    request = ask(engine, PROMPT, best_of=2, temperature=1.0, seed=1, max_tokens=4)
    engine.step()
    change_weights(engine)
    (values,) = told(engine, request)
    check(PROMPT, values)


def test_a_block_that_knows_less_than_the_next_ends_what_is_known() -> None:
    """Its values were replaced by fewer, which tell of more; the next blocks have all of theirs."""
    engine = tiny_engine(model())
    told(engine, ask(engine, PROMPT))
    told(engine, ask(engine, PROMPT[:6], 3, max_tokens=1))  # its tail begins a block of the first
    check(PROMPT, told(engine, ask(engine, PROMPT))[0])


def test_as_many_of_the_likeliest_are_told_as_were_asked_for() -> None:
    """Though others had more computed."""
    engine = tiny_engine(model())
    told(engine, ask(engine, PROMPT, 5))
    (values,) = told(engine, ask(engine, PROMPT, 2))
    assert {len(value.top) for value in values if value} == {2}


def test_plain_requests_pass_those_that_wait_to_be_scored() -> None:
    engine = tiny_engine(model())
    engine.scheduler.config = type(engine.scheduler.config)(max_num_scored_tokens=2)
    ask(engine, PROMPT)
    ask(engine, PROMPT[::-1])
    plain = engine.add(PROMPT[3:], greedy(2))
    engine.step()
    assert plain.usage.num_completion_tokens == 1
    outputs_of(engine)


@pytest.mark.parametrize("moment", range(12))
def test_interrupts_neither_lose_nor_repeat_a_value(
    moment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny_engine(model(), max_prefill_chunk=4)
    interrupt(
        monkeypatch, moment,
        (engine.model, "forward"), (engine.scheduler, "committed"), (engine.scheduler, "fork"),
    )  # fmt: skip
    requests = [ask(engine, PROMPT, n=2, temperature=1.0, seed=1), ask(engine, PROMPT[:9])]
    values: dict[str, tuple[PromptLogprob, ...]] = {}
    while engine.has_work:
        poison(engine, float("nan"))
        try:
            deltas: list[OutputDelta] = engine.step()
        except KeyboardInterrupt:
            continue
        values |= {d.request_id: d.prompt_logprobs for d in deltas if d.prompt_logprobs}
        engine.check_invariants()
    assert_idle(engine)
    for request in requests:
        check(request.prompt.tolist(), values[request.request_id])


@pytest.mark.parametrize("seed", range(6))
def test_any_mixture_in_a_small_pool_gives_right_values(seed: int) -> None:
    """Prompts that share, resent, cut, scored or not, evicted and preempted: values are right."""
    draw = random.Random(seed)
    engine = tiny_engine(
        model(), num_blocks=14, max_prefill_chunk=draw.choice([None, 3]), max_num_batched_tokens=16
    )
    stem = [draw.randrange(3, 60) for _ in range(24)]
    for _ in range(6):
        requests = []
        for _ in range(draw.randint(1, 4)):
            prompt = stem[: draw.randint(2, 24)] + [draw.randrange(3, 60)] * draw.randint(0, 3)
            if draw.random() < 0.3:
                engine.add(prompt, greedy(6))
            else:
                requests.append(ask(engine, prompt, draw.choice([0, 2]), max_tokens=6))
        for request, values in zip(requests, told(engine, *requests), strict=True):
            check(request.prompt.tolist(), values, request.params.prompt_logprobs or 0)
