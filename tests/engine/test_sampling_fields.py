"""Penalties, exclusions, lengths and log-probabilities, from request to delta: as a plain loop over
transformers gives them, whether the prompt is cold, warm, batched, chunked or preempted."""

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from engine_runs import assert_idle, run
from tiny_models import EOS, byte_tokenizer, tiny_engine, tiny_model

from prefixkv.engine import Engine
from prefixkv.errors import InvalidRequest, StepFailed
from prefixkv.llm import LLM
from prefixkv.outputs import BranchOutput, Completion, OutputDelta
from prefixkv.sampling_params import SamplingParams

PROMPT = [10, 20, 30, 40, 50, 60, 70, 20, 30]
NUM_TOKENS = 12
A, B, HASH, EOS_ID = byte_tokenizer().encode(f"ab#{EOS}")

FIELDS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.8},
    "repetition rewarded": {"repetition_penalty": 0.4},
    "presence": {"presence_penalty": -2.0},
    "frequency": {"frequency_penalty": -0.5},
    "bias": {"logit_bias": {A: 4.0, B: 4.1, 94: -100.0}},
    "allowed": {"allowed_token_ids": tuple(range(80, 100))},
    "all": {
        "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25,
        "logit_bias": {A: 3.0, B: 3.1}, "min_tokens": 6,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@cache
def reference_model() -> Any:
    return tiny_model()


@torch.no_grad()
def raw_logits(tokens: list[int]) -> torch.Tensor:
    """The model's own logits after `tokens`, everything computed anew."""
    return torch.as_tensor(reference_model()(torch.tensor([tokens])).logits[0, -1])


def reference_tokens(params: SamplingParams) -> list[int]:
    """Greedy decoding by the formulas; end tokens are not looked at."""
    tokens = list(PROMPT)
    for _ in range(NUM_TOKENS):
        scores = raw_logits(tokens).clone()
        for token_id, bias in params.logit_bias.items():
            scores[token_id] += bias
        for token_id in set(tokens):
            factor = params.repetition_penalty
            scores[token_id] *= factor if scores[token_id] < 0 else 1 / factor
        for token_id, count in Counter(tokens[len(PROMPT) :]).items():
            scores[token_id] -= params.frequency_penalty * count + params.presence_penalty
        allowed = params.allowed_token_ids or range(len(scores))
        tokens.append(max(allowed, key=lambda token_id: float(scores[token_id])))
    return tokens[len(PROMPT) :]


def deltas_of(engine: Engine, after_step: Callable[[], None] | None = None) -> list[OutputDelta]:
    """All deltas until nothing is left, with the books checked after each step."""
    deltas = []
    while engine.has_work:
        deltas += engine.step()
        if after_step is not None:
            after_step()
        engine.check_invariants()
    return deltas


def tokens_of(deltas: list[OutputDelta], request_id: str) -> list[int]:
    return [t for delta in deltas if delta.request_id == request_id for t in delta.token_ids]


def generated(engine: Engine, **params: Any) -> Completion:
    """A greedy completion of the prompt."""
    params = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, **params}
    llm = LLM.from_engine(engine)
    (completion,) = llm.generate([PROMPT], SamplingParams(**params), use_tqdm=False)
    return completion


# -- the same however it is computed -------------------------------------------------------------


@pytest.mark.parametrize("name", FIELDS)
def test_greedy_output_is_that_of_a_plain_loop(model: Any, name: str) -> None:
    """Cold, warm, in chunks beside others, and preempted after each step."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, **FIELDS[name])
    expected = reference_tokens(params)
    engine = tiny_engine(model)
    for num_cached in (0, len(PROMPT) - 1):
        completion = generated(engine, **FIELDS[name])
        assert completion.token_ids == expected
        assert completion.usage.num_cached_tokens == num_cached
    crowded = tiny_engine(model, max_prefill_chunk=3)
    for other in FIELDS.values():
        crowded.add(
            [*PROMPT[:5], 7], SamplingParams(max_tokens=5, seed=1, **{**other, "min_tokens": 0})
        )
    mine = crowded.add(PROMPT, params, request_id="mine")
    deltas = deltas_of(crowded, crowded.scheduler.preempt_all)

    assert tokens_of(deltas, "mine") == expected
    assert mine.usage.num_preemptions > 0
    assert_idle(crowded)


def test_these_fields_do_change_the_output() -> None:
    """Else the test above would prove nothing."""
    plain = reference_tokens(SamplingParams())
    outputs = {name: reference_tokens(SamplingParams(**FIELDS[name])) for name in FIELDS}

    assert [name for name in outputs if outputs[name] == plain] == []


def test_a_seeded_draw_under_rules_depends_on_its_own_row_only(model: Any) -> None:
    """The same tokens cold, warm, beside others and after preemption."""
    params = SamplingParams(
        temperature=1.3, top_p=0.9, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True,
        repetition_penalty=1.4, frequency_penalty=0.7, logit_bias={A: 2.0}, bad_words=("a#",),
    )  # fmt: skip
    engine = tiny_engine(model)
    engine.add(PROMPT, params, request_id="cold")
    cold = tokens_of(deltas_of(engine), "cold")
    engine.add(PROMPT, params, request_id="warm")
    for seed, other in enumerate(FIELDS.values()):
        engine.add(PROMPT, SamplingParams(seed=seed, max_tokens=NUM_TOKENS, **other))
    deltas = deltas_of(engine, engine.scheduler.preempt_all)

    assert tokens_of(deltas, "warm") == cold


# -- exclusion -----------------------------------------------------------------------------------


def test_a_bad_word_of_several_tokens_never_appears(model: Any) -> None:
    """Where it would be complete, the next best token comes instead."""
    engine = tiny_engine(model)
    bias = {"logit_bias": {A: 90.0, B: 80.0}}

    assert generated(engine, **bias).text == "a" * NUM_TOKENS
    assert generated(engine, **bias, bad_words=("aaa",)).text == "aabaabaabaab"
    assert generated(engine, **bias, bad_words=("a",)).text == "b" * NUM_TOKENS
    assert generated(engine, **bias, bad_words=("aa", "ba")).text == "a" + "b" * (NUM_TOKENS - 1)


def test_rules_that_leave_nothing_are_refused_or_end_the_request(model: Any) -> None:
    """At once where it is certain, else when it comes to it; the engine goes on."""
    engine = tiny_engine(model)
    with pytest.raises(InvalidRequest, match="has 1 token ids, and bad_words") as refused:
        generated(engine, allowed_token_ids=(HASH,), bad_words=("#",))
    assert refused.value.param == "allowed_token_ids"
    with pytest.raises(StepFailed, match="allowed_token_ids, bad_words and min_tokens leave no"):
        generated(engine, allowed_token_ids=(HASH,), bad_words=("##",))
    assert_idle(engine)
    assert generated(engine, allowed_token_ids=(HASH,)).text == "#" * NUM_TOKENS


@pytest.mark.parametrize("wrong", [{"logit_bias": {259: 1.0}}, {"allowed_token_ids": (3, 10**6)}])
def test_what_this_model_cannot_do_is_refused(model: Any, wrong: dict[str, Any]) -> None:
    """Ids out of its vocabulary; and nothing is queued then."""
    engine = tiny_engine(model)
    with pytest.raises(InvalidRequest) as refused:
        generated(engine, **wrong)

    assert [refused.value.param] == list(wrong)
    assert not engine.has_work


# -- ends ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["eos", "stop_token_ids", "ignored eos"])
def test_min_tokens_keeps_end_tokens_away(model: Any, by: str) -> None:
    """They come as soon as they may, where the model wants nothing else."""
    engine = tiny_engine(model)
    params: dict[str, Any] = {"logit_bias": {HASH if by == "stop_token_ids" else EOS_ID: 100.0}}
    params |= {"stop_token_ids": (HASH,)} if by == "stop_token_ids" else {}
    params["ignore_eos"] = by == "ignored eos"

    assert len(generated(engine, **params).token_ids) == (NUM_TOKENS if by == "ignored eos" else 1)
    completion = generated(engine, **params, min_tokens=5)
    if by == "ignored eos":
        assert completion.token_ids == [EOS_ID] * NUM_TOKENS
    else:
        assert len(completion.token_ids) == 6
        assert completion.finish_reason == "stop"
    assert len(generated(engine, **params, min_tokens=NUM_TOKENS).token_ids) == NUM_TOKENS


def test_min_tokens_counts_for_stop_strings_too(model: Any) -> None:
    """A stop string that is complete before is text; one that is complete after ends the text."""
    engine = tiny_engine(model)
    params: dict[str, Any] = {"allowed_token_ids": (A,), "stop": ("aa",)}

    assert generated(engine, **params).text == ""
    late = generated(engine, **params, min_tokens=4)
    assert (late.text, late.stop_reason, len(late.token_ids)) == ("aaa", "aa", 5)
    never = generated(engine, **params, min_tokens=NUM_TOKENS)
    assert (never.text, never.finish_reason) == ("a" * NUM_TOKENS, "length")


def test_stop_strings_and_tokens_can_be_part_of_the_text(model: Any) -> None:
    """The text ends right after them; a special token has no text."""
    engine = tiny_engine(model)
    ab: dict[str, Any] = {"logit_bias": {A: 90.0, B: 80.0}, "bad_words": ("aaa",)}
    included = {"include_stop_str_in_output": True}

    assert generated(engine, **ab, stop=("aba",)).text == "a"
    assert generated(engine, **ab, stop=("aba",), **included).text == "aaba"
    assert generated(engine, **ab, stop_token_ids=(B,)).text == "aa"
    by_token = generated(engine, **ab, stop_token_ids=(B,), **included)
    assert (by_token.text, by_token.stop_reason) == ("aab", B)
    ended = generated(engine, logit_bias={EOS_ID: 100.0}, ignore_eos=False, **included)
    assert (ended.text, ended.finish_reason) == ("", "stop")


# -- log-probabilities ---------------------------------------------------------------------------


def check_logprobs(completion: Completion, num_top: int) -> None:
    """They are those of log_softmax over what the model computes anew for each position."""
    assert completion.logprobs is not None
    assert [entry.token_id for entry in completion.logprobs] == completion.token_ids
    tokens = list(completion.prompt_token_ids)
    for entry in completion.logprobs:
        expected = raw_logits(tokens).log_softmax(dim=-1)
        order = expected.argsort(descending=True).tolist()
        assert entry.logprob == pytest.approx(float(expected[entry.token_id]), abs=1e-9)
        assert entry.rank == order.index(entry.token_id) + 1
        assert [token_id for token_id, _ in entry.top] == order[:num_top]
        told = [logprob for _, logprob in entry.top]
        assert told == pytest.approx(expected[order[:num_top]].tolist(), abs=1e-9)
        tokens.append(entry.token_id)


@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_logprobs_are_the_models_own(model: Any, num_top: int) -> None:
    """Cold and warm, and whatever the parameters make of the logits."""
    engine = tiny_engine(model)
    for params in ({}, FIELDS["all"], {"temperature": 1.5, "seed": 1, "top_k": 3}):
        for _ in range(2):
            check_logprobs(generated(engine, logprobs=num_top, **params), num_top)


def test_logprobs_in_a_batch(model: Any) -> None:
    """Rows that want different numbers of them, beside rows that want none; preempted as well."""
    engine = tiny_engine(model, max_prefill_chunk=4)
    wanted = [None, 0, 3, 7]
    completions: dict[str, Completion] = {}
    for i, num_top in enumerate(wanted * 2):
        prompt = [*PROMPT[: 4 + i % 4], i]
        params = SamplingParams(seed=i, max_tokens=6, ignore_eos=True, logprobs=num_top)
        request = engine.add(prompt, params, request_id=str(i))
        completions[str(i)] = Completion(
            str(i), request.usage, [BranchOutput()], prompt_token_ids=prompt
        )
    for delta in deltas_of(engine, engine.scheduler.preempt_all):
        completions[delta.request_id].outputs[0].add(delta)

    for i, num_top in enumerate(wanted * 2):
        if num_top is None:
            assert completions[str(i)].logprobs is None
        else:
            check_logprobs(completions[str(i)], num_top)


def test_what_nobody_asks_for_is_not_computed(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rule is applied, no log-probability computed, and no delta has any."""

    def fail(*_: object) -> None:
        raise AssertionError("nobody asked for it")

    monkeypatch.setattr("prefixkv.sampling.apply_rules", fail)
    monkeypatch.setattr("prefixkv.sampling.rows_of_logprobs", fail)
    engine = tiny_engine(model)
    result, _ = run(engine, [PROMPT, PROMPT[:4]], 4)
    engine.add(PROMPT, SamplingParams(max_tokens=4, top_p=0.5))

    assert len(result.token_ids) == 2
    assert {delta.logprobs for delta in deltas_of(engine)} == {None}


def test_the_end_token_has_a_logprob_too(model: Any) -> None:
    """There is one entry for each token that is counted."""
    engine = tiny_engine(model)
    completion = generated(
        engine, logit_bias={EOS_ID: 100.0}, min_tokens=2, ignore_eos=False, logprobs=2
    )

    assert completion.token_ids[-1] == EOS_ID
    assert completion.usage.num_completion_tokens == 3
    check_logprobs(completion, 2)
