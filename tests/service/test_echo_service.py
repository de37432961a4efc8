"""Scores of prompts through a real server: the same cold and warm, and equal to a whole pass."""

from typing import Any

import httpx
import pytest
import torch
from tiny_models import byte_tokenizer, tiny_model

SERVER = "tiny_server"
PROMPT = "Once upon a time, there was"


def scored(client: httpx.Client, prompt: Any, **body: Any) -> dict[str, Any]:
    """Score as lm-eval asks."""
    request = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    answer: dict[str, Any] = client.post("/v1/completions", json={**request, **body}).json()
    return answer


def test_cold_equals_warm_equals_a_whole_pass(client: httpx.Client) -> None:
    cold, warm = (scored(client, PROMPT, cache_salt="echo") for _ in range(2))
    first, again = cold["choices"][0], warm["choices"][0]
    assert first["text"].startswith(PROMPT)
    assert first["logprobs"]["token_logprobs"][:-1] == again["logprobs"]["token_logprobs"][:-1]
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] == len(PROMPT) - 1
    tokens = torch.tensor([byte_tokenizer().encode(PROMPT)])
    with torch.no_grad():
        rows = tiny_model()(tokens).logits[0].log_softmax(dim=-1)
    expected = rows[:-1].gather(-1, tokens[0, 1:, None]).squeeze(-1).tolist()
    assert first["logprobs"]["token_logprobs"][0] is None
    assert first["logprobs"]["token_logprobs"][1:-1] == pytest.approx(expected, abs=1e-6)
    offsets = first["logprobs"]["text_offset"]
    assert [first["text"][i] for i in offsets[: len(PROMPT)]] == list(PROMPT)


def test_choices_share_their_context(client: httpx.Client) -> None:
    """All at once, as lm-eval sends them: each equals what it is alone and cold."""
    contexts = [PROMPT + choice for choice in (" a", " b", " longer one")]
    together = scored(client, contexts)
    alone = [scored(client, text, cache_salt=f"cold{i}") for i, text in enumerate(contexts)]
    for one, other in zip(together["choices"], alone, strict=True):
        assert one["logprobs"]["token_logprobs"][1:] == pytest.approx(
            other["choices"][0]["logprobs"]["token_logprobs"][1:], abs=1e-9
        )
