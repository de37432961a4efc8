"""`LLM`: prompts of any kind in, completions in their order out."""

from typing import Any

import pytest
from engine_runs import assert_idle, greedy
from tiny_models import byte_tokenizer, reference_output, tiny_engine, tiny_model

from prefixkv.errors import InvalidRequest, StepFailed
from prefixkv.llm import LLM
from prefixkv.sampling_params import SamplingParams

TEXT = "Hello, cache!"
CHAT = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@pytest.fixture
def llm(model: Any) -> LLM:
    return LLM.from_engine(tiny_engine(model))


def test_texts_ids_and_chats_are_prompts(llm: LLM, model: Any) -> None:
    """One or several, mixed; a chat goes through the template; answers keep the order."""
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(TEXT)
    chat_ids = tokenizer.encode("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    completions = llm.generate([TEXT, ids, CHAT], greedy(6), use_tqdm=False)

    assert [c.prompt_token_ids for c in completions] == [ids, ids, chat_ids]
    for completion in completions:
        expected = reference_output(model, completion.prompt_token_ids, 6)
        assert completion.token_ids == expected
        assert completion.text == tokenizer.decode(expected, skip_special_tokens=True)
        assert completion.finish_reason in ("length", "stop")
    for prompt in (TEXT, ids, CHAT):
        (single,) = llm.generate(prompt, greedy(6))
        assert single.token_ids == reference_output(model, single.prompt_token_ids, 6)
        assert single.usage.num_cached_tokens == len(single.prompt_token_ids) - 1
    assert llm.generate([], greedy(1)) == []
    assert_idle(llm.engine)


def test_each_prompt_may_have_its_own_params(llm: LLM) -> None:
    """As many params as prompts, or one for all; none means the model's defaults."""
    one, two = llm.generate([TEXT, TEXT], [greedy(1), greedy(2)], use_tqdm=False)
    assert (len(one.token_ids), len(two.token_ids)) == (1, 2)
    with pytest.raises(InvalidRequest, match="1 sampling params for 2 prompts"):
        llm.generate([TEXT, TEXT], [greedy(1)])
    (default,) = llm.generate(TEXT, use_tqdm=False)
    assert len(default.token_ids) <= 16


def test_one_bad_prompt_runs_none(llm: LLM) -> None:
    """A refusal leaves nothing queued."""
    with pytest.raises(InvalidRequest, match="empty"):
        llm.generate([[5, 6], []], greedy(2))
    assert not llm.engine.has_work
    assert_idle(llm.engine)


def test_a_stream_adds_up_to_the_completion(llm: LLM) -> None:
    """Deltas of text and ids, the last with the reason."""
    (completion,) = llm.generate(TEXT, greedy(6), use_tqdm=False)
    deltas = list(llm.stream(TEXT, greedy(6)))
    assert "".join(delta.text for delta in deltas) == completion.text
    assert [t for delta in deltas for t in delta.token_ids] == completion.token_ids
    assert [delta.finish_reason for delta in deltas][-1] == completion.finish_reason


def test_a_closed_stream_gives_up_its_blocks(llm: LLM) -> None:
    """Leaving the loop ends the request."""
    for delta in llm.stream(TEXT, SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)):
        assert delta.finish_reason is None
        break
    assert_idle(llm.engine)
    assert not llm.engine.has_work


def test_a_failing_step_raises(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the cause; nothing is left behind, and the next call works."""

    def fail(*_: object) -> None:
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.model, "forward", fail)
        with pytest.raises(StepFailed, match="planted"):
            llm.generate([TEXT, TEXT], greedy(2), use_tqdm=False)
        with pytest.raises(StepFailed, match="planted"):
            list(llm.stream(TEXT, greedy(2)))
    assert_idle(llm.engine)
    assert llm.generate(TEXT, greedy(2))[0].token_ids


def test_streams_and_calls_do_not_take_each_others_tokens(llm: LLM, model: Any) -> None:
    """A step moves all requests, whoever asked for it; each caller still reads all of its own."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    expected = [next(iter(llm.generate([p], params, use_tqdm=False))).token_ids for p in prompts]
    one, two = llm.stream(prompts[0], params), llm.stream(prompts[1], params)
    got: list[list[int]] = [[], []]
    got[0].extend(next(one).token_ids)
    got[1].extend(next(two).token_ids)
    (third,) = llm.generate([prompts[2]], params, use_tqdm=False)
    for tokens, stream in zip(got, (one, two), strict=True):
        for delta in stream:
            tokens.extend(delta.token_ids)

    assert [*got, third.token_ids] == expected
    assert_idle(llm.engine)


# -- several outputs -----------------------------------------------------------------------------


def test_a_completion_has_n_outputs(llm: LLM) -> None:
    """Samples by their index, whole and streamed; its own fields are those of the first."""
    params = SamplingParams(n=3, seed=5, max_tokens=6, logprobs=0)
    (completion,) = llm.generate(TEXT, params, use_tqdm=False)
    streamed: list[list[int]] = [[], [], []]
    for delta in llm.stream(TEXT, params):
        streamed[delta.index].extend(delta.token_ids)

    assert [output.index for output in completion.outputs] == [0, 1, 2]
    assert [output.token_ids for output in completion.outputs] == streamed
    assert len(set(map(tuple, streamed))) == 3
    assert completion.text == completion.outputs[0].text
    assert [len(output.logprobs or ()) for output in completion.outputs] == list(map(len, streamed))
    assert completion.usage.num_completion_tokens == sum(map(len, streamed))
    assert_idle(llm.engine)


def test_outputs_share_their_prompt(llm: LLM) -> None:
    """It is computed once and held once, whatever n; each output pays for its own tokens."""
    prompt = list(range(5, 45))  # ten whole blocks
    params = SamplingParams(n=8, seed=1, max_tokens=5, ignore_eos=True)
    ((completion,), block_size) = llm.generate([prompt], params), llm.engine.cache.block_size
    usage = completion.usage

    assert usage.num_cached_tokens == 0
    assert usage.num_computed_tokens == len(prompt) + 8 * 4
    assert usage.peak_num_blocks == len(prompt) // block_size + 8
    assert (usage.num_forks, usage.num_copies) == (7, 0)


def test_beams_cost_what_they_generate(llm: LLM) -> None:
    """The prompt once, each beam's tokens once; a fork copies one half-filled block at most."""
    params = SamplingParams(n=4, use_beam_search=True, max_tokens=9, ignore_eos=True)
    (completion,) = llm.generate(TEXT, params, use_tqdm=False)
    usage = completion.usage

    assert usage.num_computed_tokens == len(completion.prompt_token_ids) + 4 * 8
    assert usage.num_slots_copied <= usage.num_copies * (llm.engine.cache.block_size - 1)
    scores = [output.score or 0.0 for output in completion.outputs]
    assert scores == sorted(scores, reverse=True)
    assert_idle(llm.engine)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"length_penalty": 1000.0}, "length_penalty"),
        ({"early_stopping": 1}, "early_stopping"),
        ({"n": 260, "max_tokens": 1}, "n"),
        ({"min_tokens": 1}, "min_tokens"),
    ],
)
def test_what_a_search_refuses_never_reaches_a_step(
    llm: LLM, fields: dict[str, Any], param: str
) -> None:
    """An error in a step would end the engine, and a beam that is not there, be waited for."""
    with pytest.raises(InvalidRequest) as refused:
        llm.engine.add([5, 6], SamplingParams(**{"n": 2, "use_beam_search": True, **fields}))
    assert refused.value.param == param
    assert not llm.engine.has_work


@pytest.mark.parametrize("n", [1, 2, 5])
def test_beams_without_a_limit_share_what_the_pool_leaves(model: Any, n: int) -> None:
    """The longest that fits for each of them; one token more is refused."""
    engine = tiny_engine(model, num_blocks=60)
    params: dict[str, Any] = {"n": n, "use_beam_search": True}
    request = engine.add(range(5, 16), SamplingParams(**params, max_tokens=None))

    assert request.num_blocks_at_most(4) <= 60
    with pytest.raises(InvalidRequest, match="blocks"):
        engine.add(range(5, 16), SamplingParams(**params, max_tokens=request.max_tokens + 1))
