"""The converted default model is the model that its makers published, but for the quantisation."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from prefixkv.model import LanguageModel
from prefixkv.tokenizer import Tokenizer

pytestmark = pytest.mark.default_model

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
QUESTION = {"role": "user", "content": "What is the capital of France?"}
PROSE = (
    "The sun rises in the east and sets in the west. Water boils at one hundred degrees Celsius, "
    "and it freezes at zero. Most people sleep at night and work during the day. The French "
    "Revolution was a period of political and societal change in France which began in 1789 and "
    "ended in 1799. Many of its ideas are considered fundamental principles of liberal democracy, "
    "and its values and institutions remain central to modern French political discourse. In "
    "mathematics, a prime number is a natural number greater than one that is not a product of two "
    "smaller natural numbers."
)


@pytest.fixture(scope="module")
def tokenizer(smollm2: LanguageModel) -> Tokenizer:
    assert smollm2.tokenizer is not None
    return smollm2.tokenizer


def logits_of(model: LanguageModel, token_ids: list[int], dense_attention: Any) -> torch.Tensor:
    attention = dense_attention(model, [len(token_ids)])
    rows = torch.arange(len(token_ids))
    return model.forward(torch.tensor(token_ids), attention.positions, attention, rows)


def answer(model: LanguageModel, prompt: list[int], dense_attention: Any) -> list[int]:
    """Greedy, up to and with the end token."""
    token_ids = list(prompt)
    while len(token_ids) < len(prompt) + 30:
        token_ids.append(int(logits_of(model, token_ids, dense_attention)[-1].argmax()))
        if token_ids[-1] in model.facts.eos_token_ids:
            break
    return token_ids[len(prompt) :]


def test_the_facts(smollm2: LanguageModel, default_folder: Path) -> None:
    facts = smollm2.facts
    config = json.loads((default_folder / "config.json").read_text())

    assert (facts.num_layers, facts.num_heads, facts.num_kv_heads) == (30, 9, 3)
    assert (facts.head_dim, facts.vocab_size, facts.max_context) == (64, 49152, 8192)
    assert facts.windows == (None,) * 30
    assert facts.dtype == torch.float32
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_parameters"] == {"rope_theta": 100000.0, "rope_type": "default"}
    assert config["tie_word_embeddings"] is True
    assert facts.sampling_defaults == {}


def test_the_special_tokens(smollm2: LanguageModel, tokenizer: Tokenizer) -> None:
    """Both ends count: that of a chat turn, and that of a document of the base model."""
    assert tokenizer.hf.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>"]) == [0, 1]
    assert tokenizer.hf.bos_token == "<|im_start|>"
    assert tokenizer.hf.eos_token == "<|im_end|>"
    assert tokenizer.eos_token_id == 2
    assert smollm2.facts.eos_token_ids == {0, 2}
    assert tokenizer.special_token_ids == set(range(17))
    assert tokenizer.vocab_size == 49152


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("Hello world", ["Hello", "Ġworld"]),
        (" Hello", ["ĠHello"]),
        ("in 2024", ["in", "Ġ", "2", "0", "2", "4"]),
        ("a   7\n\n8", ["a", "ĠĠĠ", "7", "ĊĊ", "8"]),
        ("it's", ["it", "'s"]),
    ],
)
def test_text_splits_as_in_the_original_tokenizer(
    tokenizer: Tokenizer, text: str, pieces: list[str]
) -> None:
    """Digits stand alone and leave the blanks before them together; no BOS, no prefix space."""
    assert tokenizer.hf.convert_ids_to_tokens(tokenizer.encode(text)) == pieces


@pytest.mark.parametrize("text", [PROSE, " x", "a , b ' s", "日本語 🙂 ½²\t\n", "12 + 3.50 = 15,5"])
def test_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_chat_template_is_the_models_own(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.render_chat([QUESTION])
    text = tokenizer.hf.decode(token_ids)

    assert text == (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert token_ids.count(1) == 3
    assert token_ids.count(2) == 2


def test_it_answers_with_paris_and_the_next_turn_extends_the_first(
    smollm2: LanguageModel, tokenizer: Tokenizer, dense_attention: Any
) -> None:
    prompt = tokenizer.render_chat([QUESTION])
    generated = answer(smollm2, prompt, dense_attention)
    text = tokenizer.decode(generated)
    next_turn = [QUESTION, {"role": "assistant", "content": text}]
    next_turn += [{"role": "user", "content": "And of Italy?"}]

    assert "Paris" in text
    assert generated[-1] == 2
    assert tokenizer.render_chat(next_turn)[: len(prompt + generated)] == prompt + generated


def test_plain_prose_surprises_it_little(
    smollm2: LanguageModel, tokenizer: Tokenizer, dense_attention: Any
) -> None:
    """It loses 2.4 nats a token; with queries and keys left in the order of the GGUF file, 4.5."""
    token_ids = tokenizer.encode(PROSE)
    logits = logits_of(smollm2, token_ids, dense_attention)
    loss = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(token_ids[1:]))

    assert loss < 3
