"""Bodies judged by the types of the openai package, strictly: right JSON types, no missing key."""

import json
from functools import cache
from typing import Any, get_args

from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel

CHATS = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MODELS = "/v1/models"

ANSWERS: dict[str, type[BaseModel]] = {
    CHATS: ChatCompletion,
    COMPLETIONS: Completion,
    RESPONSES: Response,
}


def check_answer(path: str, body: dict[str, Any]) -> None:
    """Raise ValidationError unless `body` is a whole answer of `path`."""
    if path == MODELS:
        assert body["object"] == "list"
        for card in body["data"]:
            _check(Model, card)
        return
    if path == COMPLETIONS:
        body = json.loads(json.dumps(body))
        for choice in body["choices"]:
            _hide_first_null(choice["logprobs"])
    _check(ANSWERS[path], body)


def check_chunk(path: str, chunk: dict[str, Any]) -> None:
    """Raise ValidationError unless `chunk` is one of a stream of `path`."""
    if path == RESPONSES:
        _check(_response_events()[chunk["type"]], chunk)
    elif path == CHATS:
        _check(ChatCompletionChunk, chunk)
    else:
        chunk = json.loads(json.dumps(chunk))
        for choice in chunk["choices"]:
            # the SDK reuses the type of whole answers here, whose reason is never null
            choice["finish_reason"] = choice["finish_reason"] or "stop"
            _hide_first_null(choice["logprobs"])
        _check(Completion, chunk)


def read_stream(text: str) -> list[dict[str, Any]]:
    """Return the parsed data of server-sent events, with or without [DONE] behind them."""
    chunks = []
    for event in text.removesuffix("\n\n").split("\n\n"):
        fields = dict(line.split(": ", 1) for line in event.split("\n"))
        if fields["data"] != "[DONE]":
            chunk = json.loads(fields["data"])
            assert fields.get("event") in (None, chunk.get("type")), event
            chunks.append(chunk)
    return chunks


def _check(kind: type[BaseModel], body: Any) -> None:
    kind.model_validate_json(json.dumps(body), strict=True)


def _hide_first_null(logprobs: dict[str, Any] | None) -> None:
    """An echoed prompt's first token has no log-probability, which the SDK's types do not know."""
    if logprobs and logprobs["token_logprobs"] and logprobs["token_logprobs"][0] is None:
        assert logprobs["top_logprobs"][0] is None
        logprobs["token_logprobs"][0], logprobs["top_logprobs"][0] = 0.0, {}


@cache
def _response_events() -> dict[str, type[BaseModel]]:
    union = get_args(ResponseStreamEvent)[0]
    return {get_args(kind.model_fields["type"].annotation)[0]: kind for kind in get_args(union)}
