"""Beam search finds what transformers finds, in its order and down to equals; where transformers
fills up with impossible beams, it finds what beam search means."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from beam_oracles import (
    EarlyStopping,
    Outcome,
    Settings,
    TableModel,
    beams_in_float64,
    naive_search,
    outcome,
    search_of_ours,
    search_of_transformers,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import reference_output, tiny_model

from prefixkv.beam_search import BeamSearch, Continuation
from prefixkv.errors import InvalidRequest

PROMPT = [77, 3, 150, 9]
MAX_TOKENS = 8
EARLY_STOPPING: list[EarlyStopping] = [False, True, "never"]
MATRIX = list(itertools.product([2, 4, 8], [0.5, 1.0, 2.0], EARLY_STOPPING))


@pytest.fixture(scope="module")
def tiny() -> Any:
    return tiny_model()


@pytest.fixture(scope="module")
def frequent(tiny: Any) -> list[int]:
    """The tokens that beams take most often, so that they end beams when declared end tokens."""
    search, _ = search_of_ours(tiny, PROMPT, Settings(8, MAX_TOKENS))
    counts = Counter(token for found in search.hypotheses() for token in found.token_ids)
    return [token for token, _ in counts.most_common()]


def random_table(seed: int, num_rows: int, vocab_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator, dtype=torch.float64)


def assert_same(actual: Outcome, expected: Outcome) -> None:
    assert actual.token_ids == expected.token_ids
    assert actual.scores == pytest.approx(expected.scores, rel=1e-9, abs=1e-9)
    assert actual.num_steps == expected.num_steps


@pytest.mark.parametrize("num_reached", [0, 1, 3])
@pytest.mark.parametrize(("width", "length_penalty", "early_stopping"), MATRIX)
def test_a_model_gives_the_hypotheses_of_transformers(
    tiny: Any,
    frequent: list[int],
    width: int,
    length_penalty: float,
    early_stopping: EarlyStopping,
    num_reached: int,
) -> None:
    ends = frequent[:num_reached] or [tiny.config.eos_token_id]
    asked = Settings(width, MAX_TOKENS, length_penalty, early_stopping, tuple(ends))
    reasons: set[str] = set()
    search, num_steps = search_of_ours(
        tiny, PROMPT, asked, watch=lambda s: reasons.update(h.finish_reason for h in s.hypotheses())
    )
    with beams_in_float64():
        expected = search_of_transformers(tiny, PROMPT, asked)

    assert_same(outcome(search, num_steps), expected)
    assert ("stop" in reasons) == (num_reached > 0)
    for found in search.hypotheses():
        assert (found.finish_reason == "stop") == (found.token_ids[-1] in ends)
        length = len(found.token_ids)
        assert found.score == pytest.approx(found.cumulative_logprob / length**length_penalty)


def test_the_matrix_tells_the_three_ways_to_stop_apart(tiny: Any, frequent: list[int]) -> None:
    """Else the comparison above would not show that each is right."""
    steps = {}
    for length_penalty, early_stopping in itertools.product([0.5, 2.0], EARLY_STOPPING):
        asked = Settings(2, MAX_TOKENS, length_penalty, early_stopping, tuple(frequent[:1]))
        search, steps[length_penalty, early_stopping] = search_of_ours(tiny, PROMPT, asked)
        if length_penalty == 2.0 and not early_stopping:
            assert {h.finish_reason for h in search.hypotheses()} == {"stop", "length"}
    assert steps[0.5, False] < steps[0.5, "never"] < MAX_TOKENS
    assert steps[2.0, True] < steps[2.0, False] == steps[2.0, "never"] == MAX_TOKENS


@pytest.mark.parametrize("width", [2, 8])
def test_one_token_gives_the_likeliest_tokens_in_order(tiny: Any, width: int) -> None:
    asked = Settings(width, 1)
    search, num_steps = search_of_ours(tiny, PROMPT, asked)
    with beams_in_float64():
        expected = search_of_transformers(tiny, PROMPT, asked)
    assert_same(outcome(search, num_steps), expected)
    assert [len(found.token_ids) for found in search.hypotheses()] == [1] * width


def test_width_one_is_greedy(tiny: Any, frequent: list[int]) -> None:
    search, _ = search_of_ours(tiny, PROMPT, Settings(1, 12, 1.0, False, (2,)))
    (found,) = search.hypotheses()
    assert found.token_ids == reference_output(tiny, PROMPT, 12)
    for ends in itertools.combinations(frequent[:6], 2):
        search, num_steps = search_of_ours(tiny, PROMPT, Settings(1, 12, 1.0, False, ends))
        (cut,) = search.hypotheses()
        first_end = [token in ends for token in [*found.token_ids, ends[0]]].index(True)
        assert cut.token_ids == found.token_ids[: first_end + 1]
        assert num_steps == len(cut.token_ids)


@st.composite
def tied_searches(draw: st.DrawFn) -> tuple[Settings, torch.Tensor]:
    """A search over a table of very few different logits, so that equals are everywhere."""
    width = draw(st.integers(2, 5))
    ends = tuple(draw(st.sets(st.integers(0, 4), max_size=3)))
    asked = Settings(
        width,
        draw(st.integers(1, 7)),
        draw(st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0])),
        draw(st.sampled_from(EARLY_STOPPING)),
        ends,
    )
    # fewer tokens leave beams that transformers fills up with impossible ones
    vocab_size = draw(st.integers(max(5, width + len(ends)), 12) | st.just(400))
    num_rows = draw(st.integers(1, 4))
    num_logits = num_rows * min(vocab_size, 12)
    logits = draw(st.lists(st.integers(0, 2), min_size=num_logits, max_size=num_logits))
    table = torch.tensor(logits, dtype=torch.float64).view(num_rows, -1)
    table = table.repeat(1, math.ceil(vocab_size / table.shape[1]))[:, :vocab_size]
    table[:, list(ends)] += draw(st.sampled_from([0.0, 0.5, 2.0]))
    return asked, table


@settings(max_examples=120)
@given(tied_searches(), st.sampled_from([torch.float32, torch.float64]))
def test_equals_come_in_the_order_of_transformers(
    searched: tuple[Settings, torch.Tensor], dtype: torch.dtype
) -> None:
    """To the last bit, and in float32 with transformers as it is."""
    asked, table = searched
    model = TableModel(table.to(dtype))
    with beams_in_float64() if dtype == torch.float64 else nullcontext():
        expected = search_of_transformers(model, [1, 2], asked)
    assert outcome(*search_of_ours(model, [1, 2], asked, dtype)) == expected


def logprobs_of(model: TableModel, tokens: Sequence[int]) -> list[float]:
    logits = model(torch.tensor([[0, *tokens]])).logits[0, 0]
    values: list[float] = logits.log_softmax(-1).tolist()
    return values


@given(
    st.integers(0, 2**31),
    st.integers(1, 9),
    st.integers(1, 6),
    st.floats(-1.5, 2.5),
    st.sampled_from(EARLY_STOPPING),
    st.sets(st.integers(0, 6), max_size=4),
    st.integers(2, 12),
    st.floats(0, 0.9),
)
@settings(max_examples=150)
def test_few_tokens_and_bans_leave_what_beam_search_means(
    seed: int,
    width: int,
    max_tokens: int,
    length_penalty: float,
    early_stopping: EarlyStopping,
    ends: set[int],
    vocab_size: int,
    banned_share: float,
) -> None:
    """Against lists; here transformers fails, or goes on with copies of beams at -1e9."""
    table = random_table(seed, 2003, vocab_size)
    banned = random_table(seed + 1, 2003, vocab_size) < torch.tensor(banned_share * 4 - 2)
    banned[:, seed % vocab_size] = False
    model = TableModel(table.masked_fill(banned, -torch.inf))
    asked = Settings(width, max_tokens, length_penalty, early_stopping, tuple(ends))
    found = outcome(*search_of_ours(model, [0], asked))
    assert_same(found, naive_search(lambda tokens: logprobs_of(model, tokens), asked))


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("early_stopping", EARLY_STOPPING)
def test_beams_enough_for_everything_find_everything_best_first(
    length_penalty: float, early_stopping: EarlyStopping
) -> None:
    vocab_size, max_tokens, end = 3, 4, 1
    model = TableModel(random_table(5, 2003, vocab_size))
    scores: dict[tuple[int, ...], float] = {}
    for path in itertools.product(range(vocab_size), repeat=max_tokens):
        tokens = path[: path.index(end) + 1] if end in path else path
        total = sum(logprobs_of(model, tokens[:i])[token] for i, token in enumerate(tokens))
        scores[tokens] = total / len(tokens) ** length_penalty
    best_first = sorted(scores, key=lambda tokens: -scores[tokens])
    asked = Settings(vocab_size**max_tokens, max_tokens, length_penalty, early_stopping, (end,))
    search, num_steps = search_of_ours(model, [0], asked)
    expected = [list(tokens) for tokens in best_first]
    assert_same(
        outcome(search, num_steps), Outcome(expected, sorted(scores.values())[::-1], max_tokens)
    )


def test_rows_say_who_goes_on_from_whom() -> None:
    search = BeamSearch(width=2, max_tokens=3, end_token_ids=[3])
    assert (search.num_live, search.is_done, search.hypotheses()) == (1, False, [])
    # token 3 ends a beam: 1 and 0 go on
    assert search.advance(torch.tensor([[-3.0, -1.0, -9.0, -2.0]])) == [
        Continuation(parent=0, token_id=1),
        Continuation(parent=0, token_id=0),
    ]
    assert [found.token_ids for found in search.hypotheses()] == [[3]]
    assert search.num_live == 2
    rows = search.advance(torch.tensor([[-8.0, -9.0, -7.0, -9.0], [-9.0, -1.0, -9.0, -9.0]]))
    assert rows == [Continuation(1, 1), Continuation(0, 2)]
    assert search.advance(torch.zeros(2, 4)) == []
    assert (search.num_live, search.is_done) == (0, True)
    with pytest.raises(AssertionError, match="over"):
        search.advance(torch.zeros(2, 4))


def test_where_short_is_favoured_a_live_beam_is_rated_at_its_present_length() -> None:
    """Its score can only fall from there; -0.2 * 30 at the longest would end the search."""
    search = BeamSearch(
        width=2, max_tokens=30, length_penalty=-1.0, early_stopping="never", end_token_ids=[0]
    )
    search.advance(torch.tensor([[-3.0, -0.1, -4.0]]))
    search.advance(torch.tensor([[-2.5, -0.1, -9.0], [-9.0, -9.0, -9.0]]))
    assert [found.score for found in search.hypotheses()] == pytest.approx([-3.0, -5.2])
    assert not search.is_done


def test_no_possible_continuation_ends_the_search() -> None:
    search = BeamSearch(width=2, max_tokens=9, end_token_ids=[0])
    search.advance(torch.tensor([[-1.0, -2.0, -math.inf]]))
    assert search.num_live == 1
    assert search.advance(torch.full((1, 3), -math.inf)) == []
    assert [found.token_ids for found in search.hypotheses()] == [[0]]


def test_sums_of_narrow_dtypes_are_kept_in_float32() -> None:
    found = []
    for widen in (False, True):
        search = BeamSearch(width=3, max_tokens=5)
        steps = iter(random_table(1, 15, 40).view(5, 3, 40).log_softmax(-1).bfloat16())
        while not search.is_done:
            logprobs = next(steps)[: search.num_live]
            search.advance(logprobs.float() if widen else logprobs)
        found.append(search.hypotheses())
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"width": 0}, "width is 0; it must be at least 1"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"length_penalty": math.nan}, "length_penalty is nan; it must be finite"),
        ({"length_penalty": -30.0}, "finite, and 10 to its power below 1e30"),
        ({"early_stopping": "always"}, "early_stopping is 'always'"),
        ({"early_stopping": 1}, "early_stopping is 1"),
    ],
)
def test_arguments_out_of_range_are_refused_by_name(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as refused:
        BeamSearch(**{"width": 2, "max_tokens": 10, **changed})
    assert refused.value.param in changed
