"""Text that comes out token by token is the text of all tokens, cut before the first stop string,
wherever tokens begin and end."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from prefixkv.detokenizer import Detokenizer
from prefixkv.tokenizer import Tokenizer

SPECIAL = 0


class ByteTokens:
    """Token 0 is special; token i + 1 stands for the bytes `pieces[i]`. Counts decoded tokens."""

    special_token_ids = frozenset({SPECIAL})

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces
        self.num_decoded = 0

    def decode(self, token_ids: Sequence[int]) -> str:
        self.num_decoded += len(token_ids)
        return b"".join(self.pieces[i - 1] for i in token_ids if i).decode(errors="replace")


def sentencepiece_like() -> Tokenizer:
    """A tokenizer with blanks as part of tokens, stripped at the start, and byte fallback."""
    words = ["<s>", "\u2581", "\u2581the", "\u2581cat", "s", ",", "\u2581\u2581"]
    vocab = {word: i for i, word in enumerate(words)}
    vocab |= {f"<0x{byte:02X}>": len(words) + byte for byte in range(256)}
    rust = RustTokenizer(models.BPE(vocab, [], byte_fallback=True))
    rust.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    hf = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=rust, bos_token="<s>"
    )
    return Tokenizer(hf)


SENTENCEPIECE = sentencepiece_like()
FIRST_BYTE = 7


def run(detokenizer: Detokenizer, token_ids: Sequence[int]) -> tuple[list[str], str | None]:
    deltas = []
    for token_id in token_ids:
        delta, found = detokenizer.push(token_id)
        deltas.append(delta)
        if found is not None:
            return deltas, found
    rest, found = detokenizer.flush()
    return [*deltas, rest], found


def cut(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """The oracle: look at each beginning of the text, longest stop string first."""
    for end in range(len(text) + 1):
        for candidate in sorted(stop, key=len, reverse=True):
            if text[:end].endswith(candidate):
                return text[: end - len(candidate)], candidate
    return text, None


def split(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    edges = [0, *sorted({c % (len(data) + 1) for c in cuts}), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


texts = st.text(alphabet="ab é日🙂\ufffd\n", max_size=30)
whole_texts = st.text(alphabet="ab é日🙂\n", max_size=30)
cuts = st.lists(st.integers(0, 120), max_size=40)
stops = st.lists(st.text(alphabet="abé日\n", min_size=1, max_size=4), max_size=4)


@given(texts, cuts, stops)
@example("a\ufffd", [], ["a"])  # held back to the end, for it might have been half a character
def test_any_split_gives_the_whole_text_up_to_the_first_stop(
    text: str, cuts: list[int], stop: list[str]
) -> None:
    pieces = split(text.encode(), cuts)
    detokenizer = Detokenizer(ByteTokens(pieces), stop)
    deltas, found = run(detokenizer, range(1, len(pieces) + 1))

    assert ("".join(deltas), found) == cut(text, stop)


@given(texts, cuts, st.text(alphabet="abé日", min_size=1, max_size=3))
def test_one_stop_string_cuts_where_find_finds_it(text: str, cuts: list[int], stop: str) -> None:
    pieces = split(text.encode(), cuts)
    deltas, found = run(Detokenizer(ByteTokens(pieces), [stop]), range(1, len(pieces) + 1))
    at = text.find(stop)

    assert "".join(deltas) == (text if at < 0 else text[:at])
    assert (found is None) == (at < 0)


@given(st.lists(st.binary(min_size=1, max_size=3), max_size=120))
def test_bytes_that_are_no_text_decode_as_they_do_at_once(pieces: list[bytes]) -> None:
    deltas, _ = run(Detokenizer(ByteTokens(pieces)), range(1, len(pieces) + 1))

    assert "".join(deltas) == b"".join(pieces).decode(errors="replace")


@given(whole_texts, cuts)
def test_no_delta_holds_half_a_character(text: str, cuts: list[int]) -> None:
    pieces = split(text.encode(), cuts)
    deltas, _ = run(Detokenizer(ByteTokens(pieces)), range(1, len(pieces) + 1))

    assert not any("\ufffd" in delta for delta in deltas)


@pytest.mark.parametrize(
    "pieces",
    [[b"a"], [b"\xff"], ["日".encode()[:2]], [b""], [b"\xa5\xe6\x97"], [b"x", b"\xf0"]],
)
def test_the_cost_of_a_token_does_not_grow(pieces: list[bytes]) -> None:
    """Also for output that never ends on a whole character, or has no text at all."""
    tokens = ByteTokens(pieces)
    detokenizer = Detokenizer(tokens, ["never"])
    for i in range(2000):
        detokenizer.push(1 + i % len(pieces))

    assert tokens.num_decoded < 2000 * 60


def test_text_comes_out_even_if_every_token_ends_inside_a_character() -> None:
    pieces = split("日".encode() * 100, range(2, 300, 3))
    deltas, _ = run(Detokenizer(ByteTokens(pieces)), range(1, len(pieces) + 1))

    assert "".join(deltas) == "日" * 100
    assert len("".join(deltas[:60])) > 30


def test_special_tokens_have_no_text() -> None:
    detokenizer = Detokenizer(ByteTokens([b"a", b"b"]), ["ab"])

    assert detokenizer.push(SPECIAL) == ("", None)
    assert detokenizer.push(1) == ("", None)
    assert detokenizer.push(SPECIAL) == ("", None)
    assert detokenizer.push(2) == ("", "ab")


def test_text_after_a_stop_string_in_the_same_token_is_dropped() -> None:
    detokenizer = Detokenizer(ByteTokens([b"one\nHuman: two"]), ["\nHuman:"])

    assert detokenizer.push(1) == ("one", "\nHuman:")


@given(texts, st.lists(st.integers(0, 40)), st.lists(st.text("ab", min_size=1, max_size=3)))
def test_an_included_stop_string_ends_the_text(text: str, cuts: list[int], stop: list[str]) -> None:
    """The text is cut after it, whatever the tokens, and nothing is held back for it."""
    data = text.encode()
    pieces = split(data, cuts)
    detokenizer = Detokenizer(ByteTokens(pieces), stop, stop_included=True)
    deltas, found = run(detokenizer, range(1, len(pieces) + 1))
    expected, expected_stop = cut(text, stop)

    assert found == expected_stop or found is None
    assert "".join(deltas) == expected + (expected_stop or "")


@given(st.lists(st.sampled_from(["a", "b", "ab", "aa"])), st.integers(0, 12))
def test_a_stop_string_counts_only_if_its_last_token_may_stop(
    words: list[str], num_first: int
) -> None:
    """What the first tokens complete is text; what they begin and later ones complete is not."""
    stop = ["aab", "aa", "ba"]
    detokenizer = Detokenizer(ByteTokens([word.encode() for word in words]), stop)
    text, found = "", None
    for i in range(len(words)):
        delta, found = detokenizer.push(i + 1, may_stop=i >= num_first)
        text += delta
        if found is not None:
            break
    else:
        text += detokenizer.flush()[0]
    whole, first = "".join(words), "".join(words[:num_first])
    ends = [
        (end, -len(one), one)
        for one in stop
        for end in range(len(first) + 1, len(whole) + 1)
        if whole[:end].endswith(one)
    ]

    assert (text, found) == (
        (whole[: min(ends)[0] - len(min(ends)[2])], min(ends)[2]) if ends else (whole, None)
    )


def test_what_may_become_a_stop_string_is_held_back_until_it_cannot() -> None:
    detokenizer = Detokenizer(ByteTokens([b"x", b"aa", b"b"]), ["aaab", "aac"])

    assert [detokenizer.push(t)[0] for t in (1, 2, 2, 1)] == ["x", "", "a", "aaax"]
    assert detokenizer.push(2) == ("", None)
    assert detokenizer.flush() == ("aa", None)


@given(st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 6]), max_size=12))
def test_spaces_of_a_sentencepiece_tokenizer(token_ids: list[int]) -> None:
    deltas, _ = run(Detokenizer(SENTENCEPIECE), token_ids)

    assert "".join(deltas) == SENTENCEPIECE.decode(token_ids)


@given(st.lists(st.sampled_from(["\u2581the", "s", ","]) | whole_texts, max_size=6))
def test_byte_fallback_gives_whole_characters(parts: list[str]) -> None:
    token_ids: list[int] = []
    for part in parts:
        known = {"\u2581the": [2], "s": [4], ",": [5]}.get(part)
        token_ids += known or [FIRST_BYTE + byte for byte in part.encode()]
    deltas, _ = run(Detokenizer(SENTENCEPIECE), token_ids)

    assert "".join(deltas) == SENTENCEPIECE.decode(token_ids)


def test_broken_bytes_do_not_spoil_text_that_is_out_already() -> None:
    letters = [FIRST_BYTE + byte for byte in "日".encode()]
    deltas, _ = run(Detokenizer(SENTENCEPIECE), [*letters, FIRST_BYTE + 0xFF, 2])

    assert "".join(deltas) == "日\ufffd the"


def test_a_continued_text_keeps_its_first_space() -> None:
    fresh, _ = run(Detokenizer(SENTENCEPIECE), [2])
    continued, _ = run(Detokenizer(SENTENCEPIECE, context=[3]), [2])

    assert ("".join(fresh), "".join(continued)) == ("the", " the")
