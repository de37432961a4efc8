"""JSON schemas of what routes answer, for the OpenAPI document; `bodies` makes what they say."""

from typing import Any

JsonSchema = dict[str, Any]

TEXT: JsonSchema = {"type": "string"}
COUNT: JsonSchema = {"type": "integer", "minimum": 0}


def closed(**properties: JsonSchema) -> JsonSchema:
    """Return the schema of an object that has these members, and no other ones."""
    return {**has(**properties), "additionalProperties": False}


def has(**properties: JsonSchema) -> JsonSchema:
    """Return the schema of an object that has these members, and perhaps more."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def many(items: JsonSchema, at_least: int = 0) -> JsonSchema:
    """Return the schema of an array."""
    return {"type": "array", "items": items, "minItems": at_least}


def nullable(schema: JsonSchema) -> JsonSchema:
    """Return `schema`, or null."""
    return {"anyOf": [schema, {"type": "null"}]}


ERROR = closed(error=closed(message=TEXT, type=TEXT, param=nullable(TEXT), code=nullable(TEXT)))

USAGE = has(
    prompt_tokens=COUNT,
    completion_tokens=COUNT,
    total_tokens=COUNT,
    prompt_tokens_details=has(cached_tokens=COUNT),
)

_HEAD = {"id": TEXT, "created": COUNT, "model": TEXT, "system_fingerprint": TEXT}
_ENDING: dict[str, JsonSchema] = {
    "index": COUNT,
    "finish_reason": {"enum": ["stop", "length"]},
    "stop_reason": {"type": ["integer", "string", "null"]},
}

_TOKEN_LISTS = has(
    tokens=many(TEXT),
    token_logprobs=many({"type": ["number", "null"]}),
    top_logprobs=many({"type": ["object", "null"]}),
    text_offset=many(COUNT),
)
COMPLETION = has(
    **_HEAD,
    object={"const": "text_completion"},
    choices=many(has(**_ENDING, text=TEXT, logprobs=nullable(_TOKEN_LISTS)), 1),
    usage=USAGE,
)

_TOKEN = has(token=TEXT, logprob={"type": "number"}, bytes=nullable(many(COUNT)))
CHAT_COMPLETION = has(
    **_HEAD,
    object={"const": "chat.completion"},
    choices=many(
        has(
            **_ENDING,
            message=has(role={"const": "assistant"}, content=TEXT, refusal={"type": "null"}),
            logprobs=nullable(has(content=many(_TOKEN))),
        ),
        1,
    ),
    usage=USAGE,
)

_ITEM = has(id=TEXT, type=TEXT, status=TEXT)
RESPONSE = has(
    id=TEXT,
    object={"const": "response"},
    created_at=COUNT,
    status={"enum": ["completed", "incomplete"]},
    model=TEXT,
    output=many(has(**_ITEM["properties"], role={"const": "assistant"}, content=many(has()))),
    parallel_tool_calls={"type": "boolean"},
    tool_choice={},
    tools=many({}),
    usage=has(
        input_tokens=COUNT,
        input_tokens_details=has(cached_tokens=COUNT),
        output_tokens=COUNT,
        output_tokens_details=has(reasoning_tokens=COUNT),
        total_tokens=COUNT,
    ),
)
DELETED = has(id=TEXT, object={"const": "response.deleted"}, deleted={"const": True})
ITEMS = has(object={"const": "list"}, data=many(_ITEM), has_more={"type": "boolean"})
EXPLANATION = has(id=TEXT, object={"const": "cache_report"}, prompts=many(has()))

MODEL = has(id=TEXT, object={"const": "model"}, created=COUNT, owned_by=TEXT, max_model_len=COUNT)
MODEL_LIST = has(object={"const": "list"}, data=many(MODEL, 1))
TOKENIZED = has(
    count=COUNT, max_model_len=COUNT, tokens=many(COUNT), token_strs=nullable(many(TEXT))
)
DETOKENIZED = has(prompt=TEXT)
RESET = has(success={"const": True})
HEALTH = has(status={"const": "ok"})
VERSION = has(version=TEXT)
