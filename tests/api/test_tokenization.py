"""POST /tokenize and /detokenize, GET /tokenizer_info, in vLLM's shapes."""

from typing import Any

import httpx
import pytest

from tests.api.fake_engine import MAX_MODEL_LEN

CHAT = [{"role": "user", "content": "Hi"}]


def test_a_prompt_is_tokenised(client: httpx.Client) -> None:
    """All four keys are there, whatever was asked."""
    body = client.post("/tokenize", json={"model": "m", "prompt": "aé"}).json()
    assert body == {
        "count": 3, "max_model_len": MAX_MODEL_LEN, "tokens": [97, 195, 169], "token_strs": None,
    }  # fmt: skip
    body = client.post("/tokenize", json={"prompt": "a", "return_token_strs": True}).json()
    assert body["token_strs"] == ["61"]
    assert client.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []


def test_a_chat_is_tokenised_as_it_is_computed(client: httpx.Client) -> None:
    """The number of tokens is that of the usage of the same chat."""
    chat = {"messages": CHAT, "chat_template_kwargs": {"x": 1}}
    body = client.post("/tokenize", json=chat).json()
    answer = client.post("/v1/chat/completions", json={**chat, "max_tokens": 1}).json()
    assert body["count"] == answer["usage"]["prompt_tokens"] == len(body["tokens"])
    assert bytes(body["tokens"]).decode() == "<user>Hi\n<x=1>\n<assistant>"
    bare = client.post("/tokenize", json={"messages": CHAT, "add_generation_prompt": False}).json()
    assert bytes(bare["tokens"]).decode() == "<user>Hi"


def test_tokens_become_text(client: httpx.Client) -> None:
    """And text that was tokenised is what it was."""
    tokens = client.post("/tokenize", json={"prompt": "naïve ☃"}).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": "naïve ☃"}
    assert client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": CHAT, "chat_template_kwargs": {"tokenize": 1}},
         "chat_template_kwargs.tokenize"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
        ("/detokenize", {"tokens": [1, "a"]}, "tokens.1"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
    ],
)  # fmt: skip
def test_wrong_bodies_are_refused(
    client: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    """With 400 and the name of what is wrong."""
    response = client.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_models_and_bodies_are_checked_as_everywhere(client: httpx.Client) -> None:
    """An unknown model is 404, a body that is not JSON 400 or 415, one that is too large 413."""
    for path in ("/tokenize", "/detokenize"):
        assert client.post(path, json={"model": "x", "prompt": "a"}).status_code == 404
        assert client.post(path, content=b"{").status_code == 415
        headers = {"content-type": "application/json"}
        assert client.post(path, content=b"{", headers=headers).status_code == 400
        assert client.post(path, json={"prompt": "a" * 300_001}).status_code == 413


def test_the_tokenizer_describes_itself(client: httpx.Client) -> None:
    """What lm-eval asks before it begins."""
    assert client.get("/tokenizer_info").json()["tokenizer_class"] == "ByteTokenizer"
