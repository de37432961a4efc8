"""The engine's promises besides exactness: refusals, failures, ends of outputs, reset."""

import logging
from contextlib import suppress
from typing import Any

import pytest
import torch
from engine_runs import Run, assert_idle, collect, greedy, run
from tiny_models import byte_tokenizer, reference_output, tiny_engine, tiny_model

from prefixkv.config import EngineConfig
from prefixkv.engine import Engine
from prefixkv.errors import (
    ConfigError,
    ContextLengthExceeded,
    InvalidRequest,
    ModelError,
    RequestTooLarge,
)
from prefixkv.model import LanguageModel
from prefixkv.sampling_params import SamplingParams

PROMPT = [10, 20, 30, 40, 50, 60, 70]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "error", "message"),
    [
        ([], 1, InvalidRequest, "the prompt is empty"),
        ([5, 999], 1, InvalidRequest, r"token id 999 is out of the vocabulary, \[0, 259\)"),
        ([5, -1], 1, InvalidRequest, "token ids must be integers"),
        ([5, 2**40], 1, InvalidRequest, "token ids must be integers"),
        ([5] * 600, 1, ContextLengthExceeded, "600 prompt tokens and 1 output tokens do not fit"),
        ([5] * 512, None, ContextLengthExceeded, "512 prompt tokens do not fit into the context"),
        ([5] * 500, 13, ContextLengthExceeded, "500 prompt tokens and 13 output tokens"),
        ([5] * 60, 10, RequestTooLarge, "need 18 blocks of 4 tokens, the pool has 16"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_numbers(
    model: Any, prompt: list[int], max_tokens: int | None, error: type, message: str
) -> None:
    """Each refusal is one sentence; nothing is queued, and the pool is as it was."""
    engine = tiny_engine(model, num_blocks=16, max_model_len=512)
    with pytest.raises(error, match=message):
        engine.add(prompt, SamplingParams(max_tokens=max_tokens))

    assert not engine.has_work
    assert_idle(engine)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": "1"},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_p": float("nan")},
        {"top_k": -2},
        {"top_k": 1.5},
        {"min_p": -0.1},
        {"min_p": 2.0},
        {"max_tokens": 0},
        {"max_tokens": -5},
        {"max_tokens": True},
        {"seed": 2**64},
        {"stop": ("",)},
        {"stop": tuple(map(str, range(65)))},
        {"stop_token_ids": (-1,)},
    ],
)
def test_sampling_parameters_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    """The message names the field, and the error carries its name."""
    (name,) = wrong
    with pytest.raises(InvalidRequest, match=f"^{name} is ") as caught:
        SamplingParams(**wrong)
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 12}, "block_size is 12"),
        ({"num_blocks": 0}, "num_blocks is 0"),
        ({"num_blocks": 2**40}, "GiB are available"),
        ({"num_blocks": None, "kv_cache_memory_bytes": 10}, "at least 2"),
        ({"num_blocks": 8, "kv_cache_memory_bytes": 10}, "give one"),
        ({"max_model_len": 513}, "max_model_len is 513, the model's context is 512"),
        ({"attention_backend": "cpu"}, "float32 and bfloat16"),
        ({"attention_backend": "magic"}, "magic"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_batched_tokens": -1}, "max_num_batched_tokens is -1"),
        ({"max_prefill_chunk": 0}, "max_prefill_chunk is 0"),
        ({"max_num_waiting": 0}, "max_num_waiting is 0"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(
    model: Any, options: dict[str, Any], message: str
) -> None:
    """More memory than there is, sizes no kernel has: a ConfigError with the numbers."""
    with pytest.raises(ConfigError, match=message):
        tiny_engine(model, **options)


def test_a_model_without_a_tokenizer_is_refused(model: Any) -> None:
    """An engine has to speak."""
    with pytest.raises(ModelError, match="without a tokenizer"):
        Engine(LanguageModel.from_transformers(tiny_model()))


def test_the_pool_takes_a_quarter_of_free_memory_and_says_so(
    model: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a size, the log tells what was chosen."""
    free = 64 * 2**20

    class Memory:
        available = free

    monkeypatch.setattr("psutil.virtual_memory", Memory)
    with caplog.at_level(logging.INFO, "prefixkv"):
        engine = tiny_engine(model, num_blocks=None)

    assert engine.kv_cache.num_blocks == free // 4 // engine.kv_cache.shape.block_bytes
    assert "a quarter of the free memory" in caplog.text


# -- ends of outputs -----------------------------------------------------------------------------


def test_max_tokens_none_takes_what_is_left(model: Any) -> None:
    """Of the context, or of the pool if that is smaller."""
    engine = tiny_engine(model, max_model_len=20)
    assert engine.add(PROMPT, SamplingParams(max_tokens=None)).max_tokens == 13
    small = tiny_engine(model, num_blocks=4)
    assert small.add(PROMPT, SamplingParams(max_tokens=None)).max_tokens == 10
    result, _ = run(small)
    assert len(result.token_ids["request-0"]) <= 10
    assert_idle(small)


def test_an_end_token_ends_the_output_unless_ignored(model: Any) -> None:
    """The end token is counted and has no text; `ignore_eos` goes on over it."""
    plain = tiny_engine(model)
    tokens = reference_output(model, PROMPT, 12)
    ending = tokens[5]
    first = tokens.index(ending)
    facts = plain.model.facts
    object.__setattr__(facts, "eos_token_ids", frozenset({ending}))
    result, (request,) = run(plain, [PROMPT], 12)
    assert result.token_ids[request.request_id] == tokens[: first + 1]
    assert result.finish_reasons[request.request_id] == "stop"
    assert request.usage.num_completion_tokens == first + 1
    plain.add(PROMPT, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    result, _ = run(plain)
    assert list(result.token_ids.values()) == [tokens]
    assert list(result.finish_reasons.values()) == ["length"]


def test_stop_strings_and_stop_tokens_end_the_output(model: Any) -> None:
    """The text ends before the stop string; a stop token says which one it was."""
    engine = tiny_engine(model)
    tokens = reference_output(model, PROMPT, 12)
    text = byte_tokenizer().decode(tokens)
    engine.add(PROMPT, SamplingParams(temperature=0, max_tokens=12), request_id="all")
    engine.add(
        PROMPT,
        SamplingParams(temperature=0, max_tokens=12, stop_token_ids=(tokens[3],)),
        request_id="token",
    )
    result = Run()
    deltas = {}
    while engine.has_work:
        for delta in engine.step():
            deltas[delta.request_id] = delta
            result.text[delta.request_id] = result.text.get(delta.request_id, "") + delta.text

    assert result.text["all"] == text
    assert deltas["all"].finish_reason == "length"
    assert deltas["token"].stop_reason == tokens[3]
    assert deltas["token"].finish_reason == "stop"


def test_the_draw_depends_on_seed_and_position_only(model: Any) -> None:
    """The same seed gives the same tokens alone, in a batch, in chunks and after preemption."""
    params = SamplingParams(temperature=1.5, top_p=0.95, seed=11, max_tokens=10, ignore_eos=True)
    alone = tiny_engine(model)
    alone.add(PROMPT, params)
    (expected,) = run(alone)[0].token_ids.values()
    crowded = tiny_engine(model, max_prefill_chunk=3)
    for seed in range(4):
        crowded.add([seed + 3] * 9, SamplingParams(seed=seed, max_tokens=10))
    crowded.add(PROMPT, params, request_id="mine")
    result = Run()
    while crowded.has_work:
        collect(crowded, result)
        crowded.scheduler.preempt_all()
    assert result.token_ids["mine"] == expected


def test_seedless_requests_differ_and_an_engine_seed_repeats_them(model: Any) -> None:
    """Without any seed two requests draw differently; with the engine's, a run repeats itself."""
    outputs = []
    for _ in range(2):
        engine = tiny_engine(model, seed=5)
        for _ in range(2):
            engine.add(PROMPT, SamplingParams(temperature=2.0, max_tokens=12, ignore_eos=True))
        outputs.append(list(run(engine)[0].token_ids.values()))
    assert outputs[0] == outputs[1]
    assert outputs[0][0] != outputs[0][1]


# -- what goes wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["forward", "copies"])
def test_a_failing_step_ends_its_requests_and_nothing_else(
    model: Any, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine lives, nothing of the step is published, and a resend computes anew."""
    engine = tiny_engine(model)
    run(engine, [PROMPT], 4)
    engine.add([*PROMPT[:6], 99], greedy(4), request_id="failing")

    def fail(*_: object) -> None:
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        if where == "forward":
            patch.setattr(engine.model, "forward", fail)
        else:
            patch.setattr(engine.backend, "copy_blocks", fail)
        (delta,) = engine.step()

    assert delta.finish_reason == "error"
    assert delta.error == "RuntimeError: planted"
    assert_idle(engine)
    prompt = [*PROMPT[:6], 99]
    result, (request,) = run(engine, [prompt], 4)
    assert list(result.token_ids.values()) == [reference_output(model, prompt, 4)]
    assert request.usage.num_cached_tokens == 6


@pytest.mark.parametrize("row", ["logits", "values"])
def test_a_request_with_values_not_finite_fails_alone(
    model: Any, row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN in one request's rows ends that request; its neighbours and the cache are untouched."""
    engine = tiny_engine(model, max_prefill_chunk=5)
    good, bad = PROMPT, [90, 91, 92, 93, 94, 95, 96, 97, 98]
    embedding = engine.model.hf.get_input_embeddings()
    forward = engine.model.forward

    def poisoned(token_ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        logits = forward(token_ids, *rest).clone()
        rows = rest[-1]
        logits[torch.isin(token_ids[rows], torch.tensor([98]))] = float("nan")
        return logits

    def poisoned_embedding(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output.masked_fill((inputs[0] == 92)[..., None], float("nan"))

    hook = None
    if row == "logits":
        monkeypatch.setattr(engine.model, "forward", poisoned)
    else:
        hook = embedding.register_forward_hook(poisoned_embedding)
    try:
        engine.add(good, greedy(6), request_id="good")
        engine.add(bad, greedy(6), request_id="bad")
        result = Run()
        while engine.has_work:
            collect(engine, result)
    finally:
        if hook is not None:
            hook.remove()
        monkeypatch.undo()

    assert result.token_ids["good"] == reference_output(model, good, 6)
    assert "not finite" in result.errors["bad"]
    assert_idle(engine)
    result, (request,) = run(engine, [bad], 6)
    assert result.token_ids[request.request_id] == reference_output(model, bad, 6)
    assert request.usage.num_cached_tokens == (5 if row == "logits" else 0)


def test_aborts_at_any_step_leave_nothing(model: Any) -> None:
    """A request can be taken away whenever; the others finish as if it had never been there."""
    expected = reference_output(model, PROMPT, 6)
    for step in range(8):
        engine = tiny_engine(model, max_prefill_chunk=3)
        engine.add(PROMPT, greedy(6), request_id="stays")
        engine.add([*PROMPT, 7, 7], greedy(6), request_id="goes")
        result = Run()
        for _ in range(step):
            collect(engine, result)
        engine.abort("goes")
        engine.check_invariants()
        assert not engine.abort("goes")
        while engine.has_work:
            collect(engine, result)
        assert result.token_ids["stays"] == expected
        assert_idle(engine)


def test_ids_in_use_are_refused(model: Any) -> None:
    """Two requests of one id could not be told apart."""
    engine = tiny_engine(model)
    engine.add(PROMPT, greedy(2), request_id="a")
    with pytest.raises(InvalidRequest, match="'a' is in use"):
        engine.add(PROMPT, greedy(2), request_id="a")


# -- the cache -----------------------------------------------------------------------------------


def test_salts_separate_and_the_same_salt_shares(model: Any) -> None:
    """Tenants never find each other's KV, nor do they find what has no salt."""
    engine = tiny_engine(model)
    cached = []
    for salt in (None, "a", "b", "a", "b", None):
        request = engine.add(PROMPT, greedy(2), cache_salt=salt)
        run(engine)
        cached.append(request.usage.num_cached_tokens)
    assert cached == [0, 0, 0, 6, 6, 6]


def test_replaced_weights_are_never_mixed_with_old_kv(model: Any) -> None:
    """With requests in flight: all of them go on under the new weights, recomputed."""
    other = tiny_model(seed=1)
    engine = tiny_engine(model)
    engine.add(PROMPT, greedy(8), request_id="flying")
    result = Run()
    for _ in range(3):
        collect(engine, result)
    before = list(result.token_ids["flying"])
    engine.model.hf.load_state_dict(other.state_dict())
    engine.weights_changed()
    engine.check_invariants()
    while engine.has_work:
        collect(engine, result)
    rest = reference_output(other, PROMPT + before, 8 - len(before))

    assert result.token_ids["flying"] == before + rest
    result, (request,) = run(engine, [PROMPT], 8)
    assert request.usage.num_cached_tokens < len(PROMPT) + 8
    assert list(result.token_ids.values()) == [reference_output(other, PROMPT, 8)]


def test_a_reset_with_requests_in_flight_changes_no_token(model: Any) -> None:
    """They go on with the KV they hold; what comes later finds nothing."""
    engine = tiny_engine(model)
    engine.add(PROMPT, greedy(8), request_id="flying")
    result = Run()
    for _ in range(3):
        collect(engine, result)
    engine.reset_prefix_cache()
    while engine.has_work:
        collect(engine, result)
    assert result.token_ids["flying"] == reference_output(model, PROMPT, 8)
    _, (request,) = run(engine, [PROMPT], 2)
    assert request.usage.num_cached_tokens == 0


def test_an_exact_resend_computes_one_token(model: Any) -> None:
    """Counted in tokens that went through the model; the pool may be no larger than the prompt."""
    for num_blocks in (16, 129):
        engine = tiny_engine(model, num_blocks=num_blocks)
        prompt = [(7 * i) % 250 + 3 for i in range(61)]
        run(engine, [prompt], 1)
        before = engine.num_computed_tokens
        result, _ = run(engine, [prompt], 1)
        assert engine.num_computed_tokens - before == 1
        assert list(result.token_ids.values()) == [reference_output(model, prompt, 1)]


def test_a_prompt_as_large_as_the_pool_is_served_again(model: Any) -> None:
    """No block is left for the copy of a partial hit: whole blocks are used, and it is right."""
    engine = tiny_engine(model, num_blocks=16)
    prompt = [(7 * i) % 250 + 3 for i in range(64)]
    expected = reference_output(model, prompt, 1)
    for cached in (0, 60):
        result, (request,) = run(engine, [prompt], 1)
        assert list(result.token_ids.values()) == [expected]
        assert request.usage.num_cached_tokens == cached
    assert_idle(engine)


def test_stats_move(model: Any) -> None:
    """Every count that is shown is counted."""
    engine = tiny_engine(model, num_blocks=8)
    request = engine.add(PROMPT, greedy(4))
    engine.add(PROMPT, greedy(4))
    engine.step()
    held = engine.fork(request)
    during = engine.stats()
    held.release()
    assert during["num_branches_held"] == 1
    assert during["num_requests_running"] == during["num_requests_deferred"] == 1
    assert during["num_requests_waiting"] == 1
    assert during["kv_cache_usage"] > 0
    run(engine)
    run(engine, [[*PROMPT[:5], 99, 99]], 4)  # copies a part of a block
    run(engine, [[i + 3] * 20 for i in range(4)], 4)
    stats = engine.stats()
    still = {name for name, value in stats.items() if not value}
    assert still <= {
        "num_requests_running", "num_requests_waiting", "num_branches_held", "num_free_blocks",
        "kv_cache_usage", "num_requests_deferred", "num_live_branches", "num_blocks_used",
        "num_block_references", "num_shared_blocks",
        "num_collisions", "num_deduplicated", "num_takeovers", "num_forks", "num_preemptions",
    }  # fmt: skip


def test_the_default_configuration_is_valid() -> None:
    """What a user gets who gives nothing."""
    config = EngineConfig()
    assert config.model == "smollm2-135m"
    assert config.scheduler_config().max_num_seqs == 64


# -- shrunk from a review ------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["compute", "commit", "deliver"])
def test_an_interrupted_step_is_taken_back(
    model: Any, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in a notebook: nothing uncomputed counts as computed, and the rest goes on right."""
    engine = tiny_engine(model, max_prefill_chunk=3)
    for i in range(3):
        engine.add([*PROMPT, i + 3], greedy(6), request_id=str(i))
    result = Run()
    target: Any = {
        "compute": (engine.model, "forward"),
        "commit": (type(engine.scheduler), "committed"),
        "deliver": (type(engine.cache), "publish"),
    }[where]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    while engine.has_work:
        with monkeypatch.context() as patch:
            patch.setattr(target[0], target[1], interrupt)
            with suppress(KeyboardInterrupt):
                collect(engine, result)
        engine.check_invariants()
        collect(engine, result)

    for i in range(3):
        assert result.token_ids[str(i)] == reference_output(model, [*PROMPT, i + 3], 6)
    again, requests = run(engine, [[*PROMPT, i + 3] for i in range(3)], 6)
    for i, request in enumerate(requests):
        assert request.usage.num_cached_tokens == len(PROMPT)
        assert again.token_ids[request.request_id] == result.token_ids[str(i)]


def test_a_request_that_cannot_be_added_leaves_nothing(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever fails in `add` fails before anything is queued."""
    engine = tiny_engine(model)

    def fail(*_: object) -> None:
        raise TypeError("planted")

    with monkeypatch.context() as patch:
        patch.setattr("prefixkv.engine.RequestOutput", fail)
        with pytest.raises(TypeError, match="planted"):
            engine.add(PROMPT, greedy(2))
    assert not engine.has_work
    with pytest.raises(InvalidRequest, match=r"^stop is"):
        SamplingParams(stop=(5,))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="tuple of non-empty strings"):
        SamplingParams(stop="abc")  # type: ignore[arg-type]
    run(engine, [PROMPT], 2)
    assert_idle(engine)


def test_an_output_that_cannot_be_decoded_fails_alone(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the tokenizer ends its own request; its neighbours lose no token."""
    engine = tiny_engine(model)
    engine.add(PROMPT, greedy(6), request_id="bad")
    engine.add([*PROMPT, 9], greedy(6), request_id="good")
    output = engine._outputs["bad"]

    def fail(*_: object) -> None:
        raise ValueError("planted")

    monkeypatch.setattr(output, "push", fail)
    result = Run()
    while engine.has_work:
        collect(engine, result)
    assert result.errors["bad"] == "ValueError: planted"
    assert result.token_ids["good"] == reference_output(model, [*PROMPT, 9], 6)
    assert_idle(engine)


def test_a_failure_while_arrays_are_built_is_cleaned_up(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No view of a block table is left behind that would keep it from being cut."""
    engine = tiny_engine(model)
    engine.add(PROMPT, greedy(6))
    engine.step()

    def fail(*_: object, **__: object) -> None:
        raise MemoryError("planted")

    with monkeypatch.context() as patch:
        patch.setattr("prefixkv.kernels.plan.np.concatenate", fail)
        (delta,) = engine.step()
    assert delta.error == "MemoryError: planted"
    assert_idle(engine)


def test_an_infinite_key_of_an_early_layer_is_noticed(model: Any) -> None:
    """Its weight may be 0, and no later layer show it; it must not be published all the same."""
    engine = tiny_engine(model)
    layer: Any = engine.model.hf.model.layers[0].self_attn.k_proj

    def infinite(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        output[:, -1] = -torch.inf
        return output

    hook = layer.register_forward_hook(infinite)
    engine.add(PROMPT, greedy(2), request_id="bad")
    (delta,) = engine.step()
    hook.remove()
    assert delta.finish_reason == "error"
    _, (request,) = run(engine, [PROMPT], 2)
    assert request.usage.num_cached_tokens == 0


def test_a_delta_keeps_the_counts_of_its_time(model: Any) -> None:
    """Usage read later does not show later tokens."""
    engine = tiny_engine(model)
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    engine.add(PROMPT, params)
    deltas = [delta for _ in range(5) for delta in engine.step()]
    assert [delta.usage.num_completion_tokens for delta in deltas] == [1, 2, 3, 4, 5]


def test_ids_of_our_own_avoid_those_in_use(model: Any) -> None:
    """A client may have taken the next one."""
    engine = tiny_engine(model)
    engine.add(PROMPT, greedy(1), request_id="request-0")
    assert engine.add(PROMPT, greedy(1)).request_id == "request-1"


def test_matches_are_counted_once_a_request(model: Any) -> None:
    """Neither tries of a waiting head nor matches after a preemption are hits."""
    engine = tiny_engine(model, num_blocks=8)
    run(engine, [[i + 3] * 9 for i in range(3)], 12)
    stats = engine.stats()
    assert stats["num_preemptions"] > 0
    assert stats["num_cached_tokens"] == 0
    assert stats["num_prompt_tokens"] == 27
