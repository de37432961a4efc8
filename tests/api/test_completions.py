"""POST /v1/completions."""

import httpx
import pytest

from tests.api.fake_engine import ALPHABET, FakeEngine
from tests.api.sse import read_events

URL = "/v1/completions"


def test_a_completion_has_every_key_clients_read(client: httpx.Client) -> None:
    """The body has the documented keys, and a cold prompt has 0 cached tokens."""
    body = client.post(URL, json={"model": "m", "prompt": "abc", "max_tokens": 3}).json()

    assert body.pop("id").startswith("cmpl-")
    assert isinstance(body.pop("created"), int)
    assert body.pop("system_fingerprint").startswith("prefixkv-")
    assert body == {
        "object": "text_completion",
        "model": "m",
        "choices": [
            {
                "index": 0,
                "text": "abc",
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 3,
            "total_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 3},
        },
    }


def test_cached_tokens_are_told(client: httpx.Client) -> None:
    """A resent prompt reports what was found in the cache."""
    client.post(URL, json={"prompt": "hello"})
    usage = client.post(URL, json={"prompt": "hello"}).json()["usage"]

    assert usage["prompt_tokens_details"]["cached_tokens"] == 4


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([97, 98], ["ab"]),
        ([[97, 98], [99]], ["ab", "c"]),
    ],
)
def test_all_four_prompt_shapes(
    client: httpx.Client, engine: FakeEngine, prompt: object, expected: list[str]
) -> None:
    """Strings and ids, one or many, reach the engine in order of their choices."""
    body = client.post(URL, json={"prompt": prompt, "max_tokens": 2}).json()

    assert engine.prompts == expected
    assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))
    assert body["usage"]["prompt_tokens"] == sum(map(len, expected))
    assert body["usage"]["completion_tokens"] == 2 * len(expected)


def test_max_tokens_defaults_to_16(client: httpx.Client) -> None:
    """A completion without a limit stops after 16 tokens, as at OpenAI."""
    body = client.post(URL, json={"prompt": "x", "max_tokens": None}).json()

    assert body["choices"][0]["text"] == ALPHABET[:16]


def test_a_stream_adds_up_to_the_whole(client: httpx.Client) -> None:
    """Chunks carry the same text, and the finish chunk carries reason and usage."""
    request = {"prompt": "x", "max_tokens": 5, "stream": True}
    chunks = read_events(client.post(URL, json=request))

    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == ALPHABET[:5]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * 4 + ["length"]
    assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert all("usage" not in chunk for chunk in chunks[:-1])


def test_a_stream_of_several_prompts_tells_them_apart(client: httpx.Client) -> None:
    """Chunks of concurrent prompts have their index; the last finish chunk has the sum."""
    request = {
        "prompt": ["one", "three"],
        "max_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    chunks = read_events(client.post(URL, json=request))

    texts = {0: "", 1: ""}
    for chunk in chunks[:-1]:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == {0: "abc", 1: "abc"}
    assert chunks[-1]["choices"] == []
    assert [chunk["usage"] for chunk in chunks if chunk.get("usage")] == [chunks[-1]["usage"]]
    assert chunks[-1]["usage"]["total_tokens"] == 8 + 6


def test_several_prompts_run_side_by_side(client: httpx.Client, engine: FakeEngine) -> None:
    """Prompts of one request do not wait for each other."""
    engine.step_s = 0.01
    request = {"prompt": ["a", "b"], "max_tokens": 5, "stream": True}
    chunks = read_events(client.post(URL, json=request))

    indices = [chunk["choices"][0]["index"] for chunk in chunks]
    assert indices.index(1) < len(indices) - 1 - indices[::-1].index(0)


def test_one_wrong_prompt_ends_the_others(client: httpx.Client, engine: FakeEngine) -> None:
    """When a prompt does not fit, the whole request is refused and nothing goes on running."""
    engine.max_model_len = 8
    response = client.post(URL, json={"prompt": ["ok", "x" * 9], "max_tokens": 4})

    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert engine.num_active == 0


def test_sampling_fields_reach_the_engine(client: httpx.Client, engine: FakeEngine) -> None:
    """Every honoured field arrives, integral floats count as integers."""
    fields = {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 7.0,
        "min_p": 0.1,
        "seed": -3,
        "max_tokens": 9,
        "max_completion_tokens": 4,
        "stop": ["z"],
        "stop_token_ids": [121],
        "ignore_eos": True,
    }
    outer = {"cache_salt": "a+/=", "priority": -2, "user": "u"}
    client.post(URL, json={"prompt": "x", **fields, **outer})

    call = engine.calls[0]
    params = call["params"]
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0, 0.5, 7, 0.1)
    assert (params.seed, params.max_tokens, params.ignore_eos) == (-3, 4, True)
    assert (params.stop, params.stop_token_ids) == (("z",), (121,))
    assert (call["cache_salt"], call["priority"]) == ("client:a+/=", -2)


def test_what_processes_logits_reaches_the_engine(client: httpx.Client, engine: FakeEngine) -> None:
    """Ids of a bias are strings in JSON; a single bad word need not be a list."""
    fields = {
        "presence_penalty": 1,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.2,
        "logit_bias": {"7": -100, "8": 1.5},
        "allowed_token_ids": [5, 6],
        "bad_words": "x",
        "min_tokens": 2,
        "include_stop_str_in_output": True,
        "logprobs": 4,
    }
    client.post(URL, json={"prompt": "x", **fields})

    params = engine.calls[0]["params"]
    assert (params.presence_penalty, params.frequency_penalty) == (1, -0.5)
    assert (params.repetition_penalty, params.logit_bias) == (1.2, {7: -100, 8: 1.5})
    assert (params.allowed_token_ids, params.bad_words) == ((5, 6), ("x",))
    assert (params.min_tokens, params.include_stop_str_in_output) == (2, True)
    assert params.logprobs == 4


def test_the_models_own_sampling_is_the_default(client: httpx.Client, engine: FakeEngine) -> None:
    """What a request leaves open comes from the model, else is neutral; null leaves it open."""
    engine.sampling_defaults = {"temperature": 0.2, "top_k": 50, "repetition_penalty": 1.1}
    client.post(URL, json={"prompt": "x", "temperature": None, "top_k": 3})

    params = engine.calls[0]["params"]
    assert (params.temperature, params.top_k, params.top_p) == (0.2, 3, 1.0)
    assert params.repetition_penalty == 1.1


def test_null_equals_absent_everywhere(client: httpx.Client) -> None:
    """A client that writes null for all it does not set is served."""
    names = (
        "temperature top_p top_k min_p seed max_tokens max_completion_tokens stop stop_token_ids "
        "ignore_eos stream stream_options user cache_salt priority request_id model n best_of "
        "logprobs echo suffix logit_bias presence_penalty response_format tools add_special_tokens "
        "frequency_penalty repetition_penalty allowed_token_ids bad_words min_tokens top_logprobs "
        "include_stop_str_in_output"
    )
    response = client.post(URL, json={"prompt": "x", **dict.fromkeys(names.split())})

    assert response.status_code == 200, response.text


@pytest.mark.parametrize(("stop", "reason"), [("c", "c"), (["d", "c"], "c")])
def test_a_stop_string_ends_the_text(client: httpx.Client, stop: object, reason: str) -> None:
    """One stop string or several; the one that hit is told."""
    choice = client.post(URL, json={"prompt": "x", "stop": stop}).json()["choices"][0]

    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (
        "ab",
        "stop",
        reason,
    )


def test_a_stop_token_is_told_by_its_id(client: httpx.Client) -> None:
    """`stop_reason` is the id where a token ended the text."""
    request = {"prompt": "x", "stop_token_ids": [98], "stream": True}
    chunks = read_events(client.post(URL, json=request))

    assert chunks[-1]["choices"][0]["stop_reason"] == 98
    assert chunks[-1]["choices"][0]["text"] == ""


def test_line_separators_survive_naive_splitters(client: httpx.Client, engine: FakeEngine) -> None:
    """U+2028, U+2029 and U+0085 are escaped; other text is sent as it is."""
    engine.script = "\u2028\u2029\x85\u00e9"
    response = client.post(URL, json={"prompt": "x", "max_tokens": 4, "stream": True})
    chunks = read_events(response)

    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == engine.script
    assert not {"\u2028", "\u2029", "\x85"} & set(response.text)
    assert "\u00e9" in response.text
