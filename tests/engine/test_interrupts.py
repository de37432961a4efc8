"""An interrupt (Ctrl-C) anywhere in a step: no token is lost, repeated, or taken for computed."""

from typing import Any

import pytest
from engine_runs import assert_idle, greedy, interrupt, outputs_of, steps
from tiny_models import reference_output, tiny_engine, tiny_model

from prefixkv.beam_search import BeamSearch
from prefixkv.cache_control import Breakpoint, CacheControl
from prefixkv.llm import LLM
from prefixkv.output_stream import OutputStream
from prefixkv.outputs import BranchOutput
from prefixkv.prefix_cache import PrefixCache
from prefixkv.sampling_params import SamplingParams
from prefixkv.scheduler import Batch, Scheduler
from prefixkv.sequence import Sequence

T = 5
PLACES: list[tuple[Any, str]] = [
    (PrefixCache, "match"), (Scheduler, "_start"), (Scheduler, "_reserve_all"), (Batch, "add"),
    (Scheduler, "_stop_running"), (Scheduler, "finish_branch"), (Scheduler, "committed"),
    (Scheduler, "fork"), (OutputStream, "push"),
]  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@pytest.mark.parametrize("moment", [0, 1, 2, 4, 7])
@pytest.mark.parametrize(("owner", "name"), PLACES)
def test_every_answer_is_whole_and_is_found_again(
    model: Any, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, moment: int
) -> None:
    """In a pool too small for all, with chunks, twins, preemption and samples; then once more."""
    prompts = [[5 + i // 2, 6, 7, 8, 9, 10, 11, 12, 13 + i // 2] for i in range(6)]
    engine = tiny_engine(model, num_blocks=9, max_prefill_chunk=4, max_num_batched_tokens=12)
    with monkeypatch.context() as patch:
        interrupt(patch, moment, (owner, name))
        for _ in range(2):
            params = SamplingParams(temperature=0, max_tokens=T, n=2)
            requests = [engine.add(prompt, params) for prompt in prompts]
            for outputs, prompt in zip(outputs_of(engine, *requests), prompts, strict=True):
                expected = reference_output(model, prompt, T)
                assert [output.token_ids for output in outputs] == [expected] * 2


def test_what_an_interrupted_schedule_wrote_is_not_taken_for_computed(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt in chunks, interrupted while another is admitted: neither sees an unwritten slot."""
    engine = tiny_engine(model, num_blocks=12, max_prefill_chunk=4)
    prompt = list(range(5, 25))
    first = engine.add(prompt, greedy(3))
    engine.step()
    second = engine.add([40, 41, 42], greedy(3))
    told: dict[str, list[int]] = {first.request_id: [], second.request_id: []}
    with monkeypatch.context() as patch:
        countdown = interrupt(patch, 0, (PrefixCache, "match"))
        for delta in steps(engine):
            told[delta.request_id] += delta.token_ids
        assert countdown[0] < 0
    assert told[first.request_id] == reference_output(model, prompt, 3)
    assert told[second.request_id] == reference_output(model, [40, 41, 42], 3)
    again = engine.add(prompt, greedy(3))
    tokens = [token for delta in steps(engine) for token in delta.token_ids]
    assert again.usage.num_cached_tokens == 19
    assert tokens == reference_output(model, prompt, 3)


def test_an_open_stream_survives_another_calls_interrupt(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the interrupted step had told is told by the next one."""
    llm = LLM.from_engine(tiny_engine(model))
    stream = llm.stream([5, 6, 7], greedy(2))
    tokens = [*next(stream).token_ids]
    with monkeypatch.context() as patch:
        interrupt(patch, 1, (OutputStream, "push"))
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[8, 9]], greedy(2))
    for delta in stream:
        tokens += delta.token_ids
    assert tokens == reference_output(model, [5, 6, 7], 2)
    assert_idle(llm.engine)


SEARCH = SamplingParams(n=2, use_beam_search=True, max_tokens=T, ignore_eos=True)


@pytest.mark.parametrize("moment", [0, 1, 3])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (BeamSearch, "advance"), (Scheduler, "branch_out"), (Scheduler, "finish_branch"),
        (OutputStream, "push"),
    ],
)  # fmt: skip
def test_a_search_is_told_once(
    model: Any, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, moment: int
) -> None:
    """Also if its end is interrupted: the same beams, the same counts, and nothing is left."""
    found = []
    for is_interrupted in (False, True):
        engine = tiny_engine(model)
        with monkeypatch.context() as patch:
            if is_interrupted:
                interrupt(patch, moment, (owner, name))
            request = engine.add([5, 6, 7], SEARCH)
            deltas = list(steps(engine))
        found.append([(delta.index, delta.token_ids, delta.text) for delta in deltas])
        assert request.usage.num_completion_tokens == 2 * T
        assert deltas[-1].usage.num_completion_tokens == 2 * T
        assert_idle(engine)
    assert found[0] == found[1]


@pytest.mark.parametrize("moment", range(4))
def test_an_interrupted_end_is_run_again(
    model: Any, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """Of a branch that has got its last token: told once, and nothing is left."""
    engine = tiny_engine(model)
    requests = [engine.add([5, 6, 7 + i], greedy(1)) for i in range(3)]
    interrupt(monkeypatch, moment, (Sequence, "release"), (engine.scheduler, "finish_branch"))
    ended = [delta.request_id for delta in steps(engine) if delta.finish_reason]
    assert sorted(ended) == sorted(request.request_id for request in requests)
    assert_idle(engine)


@pytest.mark.parametrize("moment", range(5))
def test_an_interrupted_grant_is_run_again(
    model: Any, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """Leases that were granted, renewed or given up by half: in the end the books say the same."""
    engine = tiny_engine(model)
    leases = engine.scheduler.leases
    with monkeypatch.context() as patch:
        countdown = interrupt(
            patch, moment, (leases._by_expiry, "add"), (leases._by_expiry, "remove")
        )
        for length in (6, 6, 9):
            control = CacheControl(breakpoints=(Breakpoint(length, 100.0 + length),), session="a")
            prompt = list(range(5, 5 + length))
            request = engine.add(prompt, greedy(1), cache_control=control)
            assert sum(delta.finish_reason is not None for delta in steps(engine)) == 1
            assert request.leases is not None
            assert [outcome.refused for outcome in request.leases] == [None]
        assert countdown[0] < 0
    assert [lease.sequence.num_tokens for lease in leases] == [9]
    engine.reset_prefix_cache()
    assert_idle(engine)


@pytest.mark.parametrize("moment", [0, 1])
@pytest.mark.parametrize("params", [SEARCH, SamplingParams(temperature=0, max_tokens=T, n=2)])
def test_an_error_is_told_once(
    model: Any, monkeypatch: pytest.MonkeyPatch, params: SamplingParams, moment: int
) -> None:
    """The end of a request whose step failed is interrupted: it is over all the same."""

    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    engine = tiny_engine(model)
    engine.add([5, 6, 7], params)
    told = [*engine.step()]
    with monkeypatch.context() as patch:
        interrupt(patch, moment, (Scheduler, "finish_branch"))
        patch.setattr(engine.model, "forward", fail)
        told += steps(engine)
    assert [delta.error for delta in told if delta.error] == ["RuntimeError: planted"]
    assert_idle(engine)


def test_beams_that_cannot_be_decoded_end_their_request_only(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the detokenizer at the end of a search is told; the neighbour goes on."""
    engine = tiny_engine(model)
    bad = engine.add([5, 6, 7], SEARCH)
    good = engine.add([8, 9], greedy(T + 1))
    push = OutputStream.push

    def fail_for_beams(stream: OutputStream, *args: Any) -> Any:
        if stream.request is bad:
            raise RuntimeError("planted")
        return push(stream, *args)

    monkeypatch.setattr(OutputStream, "push", fail_for_beams)
    told = list(steps(engine))
    assert [d.error for d in told if d.request_id == bad.request_id] == ["RuntimeError: planted"]
    tokens = [token for d in told if d.request_id == good.request_id for token in d.token_ids]
    assert tokens == reference_output(model, [8, 9], T + 1)
    assert_idle(engine)


@pytest.mark.parametrize("moment", [0, 1, 2])
def test_a_fork_that_waits_for_a_place_is_not_forked_twice(
    model: Any, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """Interrupted between the forks, of which none has a place: each branch is there once."""
    engine = tiny_engine(model, max_num_seqs=1)
    params = SamplingParams(temperature=0, max_tokens=T, n=4)
    engine.add([5, 6, 7], params)
    outputs = [BranchOutput(index) for index in range(4)]
    with monkeypatch.context() as patch:
        interrupt(patch, moment, (Scheduler, "fork"))
        for delta in steps(engine):
            outputs[delta.index].add(delta)
    assert [output.token_ids for output in outputs] == [reference_output(model, [5, 6, 7], T)] * 4
    assert_idle(engine)


@pytest.mark.parametrize(
    ("n", "owner", "name"), [(2, Scheduler, "fork"), (1, OutputStream, "push")]
)
def test_a_token_taken_back_finds_room_in_a_pool_that_its_request_fills(
    model: Any, monkeypatch: pytest.MonkeyPatch, n: int, owner: Any, name: str
) -> None:
    """Its block is published by then, and there is none for a copy: the block is computed again."""
    prompt = [3, 4, 3, 3, 3, 3, 4, 6, 6, 6]
    engine = tiny_engine(model, num_blocks=5, block_size=2, max_num_batched_tokens=2)
    with monkeypatch.context() as patch:
        countdown = interrupt(patch, 0, (owner, name))
        request = engine.add(prompt, SamplingParams(temperature=0, max_tokens=1, n=n))
        told = list(steps(engine))
        assert countdown[0] < 0
    assert sorted(delta.index for delta in told) == list(range(n))
    expected = tuple(reference_output(model, prompt, 1))
    assert [delta.token_ids for delta in told] == [expected] * n
    assert request.usage.num_computed_tokens == len(prompt) + 2
    assert_idle(engine)
