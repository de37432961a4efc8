"""The bytes of the tokens of a text, joined, are the bytes of the text."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import EOS, byte_tokenizer
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from prefixkv.model import LanguageModel
from prefixkv.tokenizer import Tokenizer

BYTES = Tokenizer(byte_tokenizer())


def wrapped(vocab: dict[str, int], decoder: Any, pre_tokenizer: Any = None) -> Tokenizer:
    rust = RustTokenizer(models.BPE(vocab, [], byte_fallback=True))
    rust.decoder = decoder
    if pre_tokenizer is not None:
        rust.pre_tokenizer = pre_tokenizer
    hf = PreTrainedTokenizerFast(tokenizer_object=rust)  # type: ignore[no-untyped-call]
    return Tokenizer(hf)


@given(st.text())
def test_byte_level_tokens(text: str) -> None:
    token_ids = BYTES.encode(text, add_special_tokens=False)

    assert b"".join(map(BYTES.token_bytes, token_ids)) == text.encode()


def test_all_256_bytes_have_a_token() -> None:
    ids = range(3, 259)

    assert {BYTES.token_bytes(i) for i in ids} == {bytes([byte]) for byte in range(256)}


def test_special_tokens_show_their_names_and_unknown_ids_nothing() -> None:
    eos = BYTES.eos_token_id
    assert eos is not None
    assert BYTES.token_bytes(eos) == EOS.encode()
    assert BYTES.token_bytes(100_000) == b""


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Metaspace(),
        decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback()]),
    ],
)
def test_sentencepiece_tokens_keep_their_space_and_their_bytes(decoder: Any) -> None:
    tokenizer = wrapped({"\u2581the": 0, "s": 1, "<0xE2>": 2, "\u2581\u2581": 3}, decoder)

    assert [tokenizer.token_bytes(i) for i in range(4)] == [b" the", b"s", b"\xe2", b"  "]


def test_other_tokenizers_are_asked_for_the_text() -> None:
    tokenizer = wrapped({"un": 0, "##able": 1}, decoders.WordPiece(), pre_tokenizers.Whitespace())

    assert tokenizer.token_bytes(0) == b"un"


@pytest.mark.default_model
def test_the_default_models_tokens(smollm2: LanguageModel) -> None:
    tokenizer = smollm2.tokenizer
    assert tokenizer is not None
    text = "  Zwei  Stühle, \u65e5\u672c \U0001f642\U0001f468\u200d\U0001f469!\n\tend"
    token_ids = tokenizer.encode(text)

    assert b"".join(map(tokenizer.token_bytes, token_ids)) == text.encode()
