"""JSON of bodies, however long."""

import json
from typing import Any

import httpx
import pytest

from prefixkv.api.replies.bodies import LIST_PART, dump_json, dump_long_json

LONG = [{"a": i, "b": [i] * 3} for i in range(2 * LIST_PART + 1)]


@pytest.mark.parametrize(
    "body",
    [
        {"choices": [{"logprobs": {"tokens": LONG, "none": None}, "é": "\u2028"}], "usage": {}},
        {"choices": [{"prompt_logprobs": [None, *LONG]}, {"prompt_logprobs": []}], "x": [1, [2]]},
        {},
        [],
        LONG[:LIST_PART],
        "text",
    ],
)
def test_what_is_encoded_in_parts_is_the_same(body: Any) -> None:
    """To the byte, whatever is long in it."""
    assert dump_long_json(body) == dump_json(body)


def test_a_long_prompt_is_told_again_whole(client: httpx.Client) -> None:
    """With its log-probabilities; streamed it is the same."""
    body = {"prompt": [65] * 700, "echo": True, "logprobs": 1, "max_tokens": 2}
    whole = client.post("/v1/completions", json=body | {"prompt_logprobs": 1}).json()["choices"][0]
    lines = client.post("/v1/completions", json=body | {"stream": True}).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    told = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"]]
    for name, values in whole["logprobs"].items():
        assert len(values) == 702
        assert [value for one in told for value in one[name]] == values
    assert len(whole["prompt_logprobs"]) == 700
