"""`echo` and `prompt_logprobs`: the prompt told again, whole and streamed, with its values."""

from typing import Any

import httpx
import pytest

from tests.api.fake_engine import FakeEngine
from tests.api.sse import read_events

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]


def choices(client: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    """Return the choices of a completion of 3 tokens."""
    response = client.post(COMPLETIONS, json={"max_tokens": 3, **body})
    found: list[dict[str, Any]] = response.raise_for_status().json()["choices"]
    return found


def streamed(client: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    """Return what the chunks of a stream add up to, by index."""
    told: dict[int, dict[str, Any]] = {}
    request = {"max_tokens": 3, "stream": True, **body}
    for chunk in read_events(client.post(COMPLETIONS, json=request)):
        (choice,) = chunk["choices"]
        whole = told.setdefault(choice["index"], {"text": "", "logprobs": None})
        whole["text"] += choice["text"]
        for name, values in (choice["logprobs"] or {}).items():
            whole["logprobs"] = whole["logprobs"] or {}
            whole["logprobs"].setdefault(name, []).extend(values)
    return [told[index] for index in sorted(told)]


@pytest.mark.parametrize("prompt", ["xyz", ["xyz"], [120, 121, 122], [[120, 121, 122]]])
def test_the_prompt_stands_before_its_completion(client: httpx.Client, prompt: Any) -> None:
    """A text as it came, token ids as what they spell; streamed alike."""
    assert choices(client, prompt=prompt, echo=True)[0]["text"] == "xyzabc"
    assert choices(client, prompt=prompt, echo=False)[0]["text"] == "abc"
    (told,) = streamed(client, prompt=prompt, echo=True)
    assert told == {"text": "xyzabc", "logprobs": None}


def test_every_choice_of_every_prompt_has_its_own(client: httpx.Client) -> None:
    """Index = prompt * n + number, with n and with best_of."""
    request: dict[str, Any] = {"prompt": ["x", "yy"], "echo": True, "n": 2, "logprobs": 0}
    texts = [choice["text"] for choice in choices(client, **request)]
    assert texts == ["xabc", "xbcd", "yyabc", "yybcd"]
    whole = choices(client, **request)
    assert [choice["logprobs"]["token_logprobs"] for choice in whole] == [
        [None, -6.5, -6.5, -6.5]] * 2 + [[None] + [-6.5] * 4] * 2  # fmt: skip
    told = streamed(client, **request)
    assert [one["logprobs"] for one in told] == [choice["logprobs"] for choice in whole]
    ranked = choices(client, **request, best_of=3)
    assert [choice["text"] for choice in ranked] == ["xcde", "xbcd", "yycde", "yybcd"]
    assert [len(c["logprobs"]["tokens"]) for c in ranked] == [4, 4, 5, 5]


def test_the_lists_begin_with_the_prompt(client: httpx.Client) -> None:
    """Nothing is known of the first token; offsets count from the beginning of the text."""
    (choice,) = choices(client, prompt="xyz", echo=True, logprobs=1)
    assert choice["logprobs"] == {
        "tokens": ["x", "y", "z", "a", "b", "c"],
        "token_logprobs": [None] + [-6.5] * 5,
        "top_logprobs": [None] + [{"A": -0.25, token: -6.5} for token in "yzabc"],
        "text_offset": [0, 1, 2, 3, 4, 5],
    }


def test_lm_eval_reads_what_it_needs(client: httpx.Client) -> None:
    """`token_logprobs[context:-1]` are those of the continuation."""
    request = {"prompt": [[120, 121, 122]], "echo": True, "logprobs": 1, "max_tokens": 1}
    (choice,) = choices(client, **request, temperature=0, seed=1234)
    assert choice["logprobs"]["token_logprobs"][2:-1] == [-6.5]
    assert len(choice["logprobs"]["tokens"]) == 4


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"stop": "a"}])
def test_nothing_but_the_prompt(client: httpx.Client, fields: dict[str, Any]) -> None:
    """`max_tokens: 0` scores a prompt; nothing is drawn that anybody sees."""
    request = {"prompt": "xyz", "echo": True, "logprobs": 0, "max_tokens": 0, **fields}
    body = client.post(COMPLETIONS, json=request).raise_for_status().json()
    assert [choice["text"] for choice in body["choices"]] == ["xyz"] * fields.get("n", 1)
    assert {choice["finish_reason"] for choice in body["choices"]} == {"length"}
    assert body["choices"][0]["logprobs"]["tokens"] == ["x", "y", "z"]
    assert body["usage"]["completion_tokens"] == 0
    told = streamed(client, **request)
    assert [one["text"] for one in told] == ["xyz"] * fields.get("n", 1)


def test_prompt_logprobs_of_a_completion(client: httpx.Client, engine: FakeEngine) -> None:
    """In each choice, by token id, with ranks: as vLLM has them."""
    (choice,) = choices(client, prompt="xy", prompt_logprobs=1)
    assert choice["text"] == "abc"
    assert choice["prompt_logprobs"] == [
        None,
        {
            "65": {"logprob": -0.25, "rank": 1, "decoded_token": "A"},
            str(ord("y")): {"logprob": -6.5, "rank": 27, "decoded_token": "y"},
        },
    ]
    both = choices(client, prompt=["xy", "z"], echo=True, logprobs=3, prompt_logprobs=1, n=2)
    assert [len(c["prompt_logprobs"]) for c in both] == [2, 2, 1, 1]
    assert both[0]["prompt_logprobs"] == choice["prompt_logprobs"]
    more = choices(client, prompt="xy", echo=True, logprobs=1, prompt_logprobs=3)[0]
    assert [len(top or ()) for top in more["logprobs"]["top_logprobs"]] == [0, 2, 2, 2, 2]
    assert engine.calls[-1]["params"].prompt_logprobs == 3
    assert "prompt_logprobs" not in choices(client, prompt="xy")[0]


def test_prompt_logprobs_of_a_chat(client: httpx.Client) -> None:
    """Beside the choices."""
    body = client.post(CHATS, json={"messages": MESSAGES, "prompt_logprobs": 0}).json()
    assert body["prompt_logprobs"][0] is None
    assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"max_tokens": -1, "echo": True}, "max_tokens"),
        (COMPLETIONS, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt_logprobs": -1}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt_logprobs": 21}, "prompt_logprobs"),
        (COMPLETIONS, {"echo": "yes"}, "echo"),
        (CHATS, {"max_tokens": 0}, "max_tokens"),
        (CHATS, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt_logprobs": 1, "use_beam_search": True, "n": 2}, "prompt_logprobs"),
        (COMPLETIONS, {"echo": True, "logprobs": 1, "use_beam_search": True}, "logprobs"),
    ],
)
def test_what_is_refused(
    client: httpx.Client, path: str, fields: dict[str, Any], param: str
) -> None:
    response = client.post(path, json={"prompt": "x", "messages": MESSAGES, **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_beams_can_be_echoed(client: httpx.Client) -> None:
    found = choices(client, prompt="x", echo=True, use_beam_search=True, n=2)
    assert [choice["text"] for choice in found] == ["xbcd", "xabc"]
