"""`n`, `best_of` and beam search of a real server: the same answers however they are asked for."""

from collections import defaultdict
from typing import Any

import httpx
import pytest
import torch
from openai.types import Completion
from openai.types.chat import ChatCompletion
from tiny_models import byte_tokenizer, tiny_model

from tests.api.sse import read_events

SERVER = "tiny_server"
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
SAMPLED: dict[str, Any] = {"prompt": "Once u", "temperature": 1.0, "seed": 7, "max_tokens": 9}


def ask(client: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    """Return a whole answer, valid by the strict types of the SDK."""
    answer: dict[str, Any] = client.post(path, json=body).raise_for_status().json()
    kind = ChatCompletion if path == CHATS else Completion
    kind.model_validate(answer, strict=True)
    return answer


def texts(answer: dict[str, Any]) -> list[str]:
    """Return the texts of the choices, which stand in order."""
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    return [c["text"] if "text" in c else c["message"]["content"] for c in choices]


def streamed(client: httpx.Client, path: str, **body: Any) -> tuple[list[str], dict[str, Any]]:
    """Return the texts and the usage that the chunks add up to."""
    told: dict[int, str] = defaultdict(str)
    finished = []
    chunks = read_events(client.post(path, json={**body, "stream": True}))
    for chunk in chunks:
        (choice,) = chunk["choices"]
        text = choice["text"] if "text" in choice else choice["delta"].get("content")
        told[choice["index"]] += text or ""
        finished += [choice["index"]] if choice["finish_reason"] else []
    assert sorted(finished) == sorted(told)
    assert [i for i, chunk in enumerate(chunks) if "usage" in chunk] == [len(chunks) - 1]
    return [told[index] for index in sorted(told)], chunks[-1]["usage"]


def test_greedy_choices_are_the_one_greedy_answer(client: httpx.Client) -> None:
    """Sixteen branches of a cold prompt: nothing is cached, the prompt counts once."""
    request: dict[str, Any] = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 8}
    many = ask(client, COMPLETIONS, **request, n=16, cache_salt="cold")
    one = ask(client, COMPLETIONS, **request, cache_salt="other")

    assert texts(many) == texts(one) * 16
    assert many["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"] == 16
    assert many["usage"]["completion_tokens"] == 16 * one["usage"]["completion_tokens"]
    assert many["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    warm = ask(client, COMPLETIONS, **request, n=2, cache_salt="cold")
    assert texts(warm) == texts(one) * 2
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] == 15


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_samples_with_a_seed(client: httpx.Client, path: str) -> None:
    """The same again, whole or streamed; different from each other; the first is that of n=1."""
    request = {**SAMPLED, "messages": MESSAGES}
    whole = ask(client, path, **request, n=4)
    chunks, usage = streamed(client, path, **request, n=4)

    assert len(set(texts(whole))) == 4
    assert texts(ask(client, path, **request, n=4)) == texts(whole) == chunks
    assert texts(ask(client, path, **request)) == texts(whole)[:1]
    assert usage["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert usage["prompt_tokens"] == whole["usage"]["prompt_tokens"]


def test_two_prompts_with_two_choices_each(client: httpx.Client) -> None:
    """As if asked one after the other."""
    prompts = ["Once u", "The ship"]
    apart = [ask(client, COMPLETIONS, **{**SAMPLED, "prompt": p}, n=2) for p in prompts]
    expected = [text for answer in apart for text in texts(answer)]
    request = {**SAMPLED, "prompt": prompts, "n": 2}
    together = ask(client, COMPLETIONS, **request)

    assert texts(together) == expected
    assert streamed(client, COMPLETIONS, **request)[0] == expected
    for name in ("prompt_tokens", "completion_tokens"):
        assert together["usage"][name] == sum(answer["usage"][name] for answer in apart)


def test_best_of_returns_the_likeliest(client: httpx.Client) -> None:
    """Of all that n=5 shows, those with the highest mean log-probability, the best first."""
    drawn = ask(client, COMPLETIONS, **SAMPLED, n=5, logprobs=0)
    means = []
    for choice in drawn["choices"]:
        values = choice["logprobs"]["token_logprobs"]
        means.append((sum(values) / len(values), choice["text"]))
    expected = sorted(means, reverse=True)[:2]
    best = ask(client, COMPLETIONS, **SAMPLED, n=2, best_of=5)

    assert texts(best) == [text for _, text in expected]
    assert [choice["score"] for choice in best["choices"]] == pytest.approx(
        [mean for mean, _ in expected], abs=1e-9
    )
    assert best["usage"]["completion_tokens"] == drawn["usage"]["completion_tokens"]


@pytest.mark.parametrize(("penalty", "early"), [(1.0, False), (0.0, True), (2.0, "never")])
def test_beams_are_those_of_transformers(
    client: httpx.Client, penalty: float, early: bool | str
) -> None:
    """Texts, order and scores, though the clients of vLLM spell the width `n`."""
    tokenizer, width, num_tokens = byte_tokenizer(), 4, 7
    ids = tokenizer.encode("Once u")
    expected = tiny_model().generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
        max_new_tokens=num_tokens, num_beams=width, num_return_sequences=width, do_sample=False,
        length_penalty=penalty, early_stopping=early, pad_token_id=0,
        return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    answer = ask(
        client, COMPLETIONS, prompt="Once u", max_tokens=num_tokens, n=width, use_beam_search=True,
        length_penalty=penalty, early_stopping=early,
    )  # fmt: skip

    assert texts(answer) == [
        tokenizer.decode(sequence[len(ids) :], skip_special_tokens=True)
        for sequence in expected.sequences
    ]
    scores = [choice["score"] for choice in answer["choices"]]
    assert scores == pytest.approx(expected.sequences_scores.tolist(), abs=1e-4)


def test_beams_of_a_chat_without_a_limit(client: httpx.Client) -> None:
    """As litellm sends them: they may use what the context and the pool leave to each of them."""
    answer = ask(client, CHATS, messages=MESSAGES, n=2, use_beam_search=True, early_stopping=True)

    assert len(answer["choices"]) == 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop": ["x"]}, "stop"),
        ({"logit_bias": {"7": 1}}, "logit_bias"),
        ({"length_penalty": 1000.0}, "length_penalty"),
        ({"n": 100, "max_tokens": 200}, None),
    ],
)
def test_what_a_search_cannot_do_is_the_clients_error(
    client: httpx.Client, fields: dict[str, Any], param: str | None
) -> None:
    """A 400, and the server goes on."""
    request = {"prompt": "x", "n": 2, "use_beam_search": True, **fields}
    response = client.post(COMPLETIONS, json=request)

    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert ask(client, COMPLETIONS, prompt="x", n=2, use_beam_search=True)["choices"]
