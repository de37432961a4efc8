"""Requests in the shape of each client library, written by us: what its plain use sends."""

from typing import Any

from openai_shapes import CHATS, COMPLETIONS, RESPONSES

SYSTEM = {"role": "system", "content": "You answer in one word."}
USER = {"role": "user", "content": "Which river flows through Paris?"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "Which river flows through Paris?"}]}
MARKED = {"type": "text", "text": "A long manual.", "prompt_cache_breakpoint": {"mode": "explicit"}}
EPHEMERAL = {"type": "text", "text": "Rules.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
TOOL = {"type": "function", "function": {"name": "depth", "parameters": {"type": "object"}}}
FLAT_TOOL = {"type": "function", "name": "depth", "parameters": {"type": "object"}, "strict": True}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "River", "schema": {"type": "object"}}}
USAGE = {"include_usage": True}
BOTH_USAGES = {"include_usage": True, "continuous_usage_stats": True}


def call(arguments: str, **fields: Any) -> dict[str, Any]:
    """A call of a tool in a history, its arguments spaced as the client spaces them."""
    function = {"name": "depth", "arguments": arguments}
    return {"id": "call_1", "type": "function", "function": function, **fields}


def tool_turn(content: str | None, arguments: str) -> list[dict[str, Any]]:
    """A question, a call, its result: a history that frameworks send back."""
    return [
        USER,
        {"role": "assistant", "content": content, "tool_calls": [call(arguments)]},
        {"role": "tool", "tool_call_id": "call_1", "content": "nine metres"},
    ]


Body = dict[str, Any]

SERVED: dict[str, list[tuple[str, Body]]] = {
    "openai": [
        (CHATS, {"model": "m", "messages": [USER]}),
        (CHATS, {"model": "m", "messages": [USER], "stream": True, "stream_options": USAGE}),
        (CHATS, {"messages": [USER], "stream": False, "response_format": {"type": "text"}}),
        (CHATS, {"messages": [USER], "logit_bias": {"50": -100}, "presence_penalty": 0.5}),
        (CHATS, {"messages": [USER], "prompt_cache_key": "k", "service_tier": "auto", "n": 2}),
        (COMPLETIONS, {"prompt": "x", "stream": True}),
        (COMPLETIONS, {"prompt": "x", "n": 2, "top_k": 3, "min_p": 0.1, "cache_salt": "a+/="}),
        (COMPLETIONS, {"prompt": "x", "echo": True, "max_tokens": 0}),
        (RESPONSES, {"model": "m", "input": "Which river?", "prompt_cache_key": "k"}),
        (RESPONSES, {"model": "m", "input": "Which river?", "stream": True}),
    ],
    "openai-agents": [
        (CHATS, {"messages": [{"content": "Which river?", "role": "user"}], "stream": True}),
        (CHATS, {"messages": tool_turn(None, '{"at": "Paris"}')}),
        (CHATS, {"messages": [PARTS], "prompt_cache_options": {"mode": "explicit", "ttl": "30m"},
                 "session_id": "s", "max_tokens": 9, "temperature": 0.2}),
        (RESPONSES, {"include": [], "input": [{"content": "hi", "role": "user"}],
                     "instructions": "Be short.", "model": "m", "tools": []}),
        (RESPONSES, {"include": [], "input": [{"content": "hi", "role": "user"}],
                     "instructions": "Be short.", "model": "m", "tools": [], "stream": True}),
    ],
    "langchain": [
        (CHATS, {"messages": [SYSTEM, USER], "model": "m", "stream": False}),
        (CHATS, {"messages": [USER], "model": "m", "stream": True}),
        (CHATS, {"messages": [USER], "logprobs": True, "top_logprobs": 2, "stream": False}),
        (CHATS, {"messages": [{"role": "user", "content": [MARKED, *PARTS["content"]]}],
                 "prompt_cache_key": "k", "prompt_cache_options": {"mode": "explicit"}}),
        (CHATS, {"messages": tool_turn("", '{"at":"Paris"}'), "stream": False}),
        (COMPLETIONS, {"prompt": ["x"], "best_of": 1, "n": 1, "logprobs": None, "seed": None,
                       "frequency_penalty": 0, "presence_penalty": 0, "top_p": 1,
                       "temperature": 0.7, "max_tokens": 256}),
        (RESPONSES, {"input": [{"content": "hi", "role": "user", "type": "message"}],
                     "model": "m", "stream": False}),
    ],
    "llama-index": [
        (CHATS, {"messages": [USER], "model": "m", "stream": False, "temperature": 0.1}),
        (CHATS, {"messages": [USER], "model": "m", "stream": True, "temperature": 0.1}),
        (COMPLETIONS, {"prompt": "x", "model": "m", "stream": False, "temperature": 0.1}),
        (COMPLETIONS, {"prompt": "x", "model": "m", "stream": True, "temperature": 0.1}),
    ],
    "pydantic-ai": [
        (CHATS, {"messages": [USER], "model": "m", "stream": True, "stream_options": USAGE}),
        (CHATS, {"messages": tool_turn(None, '{"at":"Paris"}'), "max_completion_tokens": 7}),
        (CHATS, {"messages": [{"role": "user", "content": [MARKED]}], "stream": False}),
        (RESPONSES, {"input": [{"role": "user", "content": "hi"}], "instructions": "Be short.",
                     "model": "m", "stream": True}),
    ],
    "smolagents": [
        (CHATS, {"messages": [PARTS], "model": "m",
                 "stop": ["Observation:", "Calling tools:", "</code>"]}),
        (CHATS, {"messages": [PARTS], "stream": True, "stream_options": USAGE}),
        (CHATS, {"messages": [
            PARTS,
            {"role": "assistant", "content": [{"type": "text", "text": "Calling tools:\n[{}]"}]},
            {"role": "user", "content": [{"type": "text", "text": "Observation:\nnine metres"}]},
        ]}),
    ],
    "litellm": [
        (CHATS, {"messages": [{"role": "system", "content": [EPHEMERAL]}, USER], "model": "m"}),
        (CHATS, {"messages": [USER], "top_k": 3, "min_p": 0.1, "cache_salt": "s", "seed": 1,
                 "prompt_cache_key": "k", "n": 2, "logprobs": True, "top_logprobs": 1}),
        (CHATS, {"messages": [USER], "n": 2, "use_beam_search": True, "seed": 1, "top_k": 3}),
        (COMPLETIONS, {"prompt": "x", "best_of": 3, "n": 2, "logprobs": 2}),
        (RESPONSES, {"input": "hi", "model": "m"}),
    ],
    "dspy": [
        (CHATS, {"messages": [SYSTEM, USER], "temperature": 1.0, "max_completion_tokens": 100}),
        (COMPLETIONS, {"prompt": "BEGIN CONVERSATION:\n\nx\n\nEND CONVERSATION.", "model": "m"}),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_text",
                                                             "text": "hi"}]}], "stream": False}),
    ],
    "guidellm": [
        (CHATS, {"messages": [PARTS], "stream": True, "stream_options": BOTH_USAGES,
                 "max_completion_tokens": 8, "ignore_eos": True}),
        (COMPLETIONS, {"prompt": "x", "stream": True, "stream_options": BOTH_USAGES,
                       "max_tokens": 8, "ignore_eos": True}),
    ],
    "aiperf": [
        (CHATS, {"messages": [USER], "model": "m", "stream": True, "stream_options": USAGE,
                 "max_completion_tokens": 8}),
    ],
    "lm-eval": [
        (COMPLETIONS, {"prompt": [[1, 2, 3], [1, 2, 4]], "temperature": 0, "max_tokens": 1,
                       "logprobs": 1, "seed": 1234, "echo": True, "model": "m"}),
        (COMPLETIONS, {"prompt": [[1, 2]], "max_tokens": 8, "stop": ["\n", "<end>"],
                       "temperature": 0, "seed": 1234}),
        (CHATS, {"messages": [USER], "max_tokens": 8, "temperature": 0, "stop": ["\n"],
                 "seed": 1234, "model": "m"}),
    ],
}  # fmt: skip

REFUSED: list[tuple[str, Body]] = [
    (CHATS, {"messages": [USER], "tools": [TOOL], "tool_choice": "auto"}),
    (CHATS, {"messages": [USER], "response_format": SCHEMA, "stream": False}),
    (CHATS, {"messages": [USER], "response_format": {"type": "json_object"}}),
    (CHATS, {"messages": [USER], "use_beam_search": True, "n": 2, "logprobs": True}),
    (COMPLETIONS, {"prompt": "x", "suffix": "y"}),
    (COMPLETIONS, {"prompt": "x", "use_beam_search": True, "n": 2, "best_of": 3}),
    (RESPONSES, {"input": "hi", "tools": [FLAT_TOOL]}),
    (RESPONSES, {"input": "hi", "text": {"format": {"type": "json_schema", "name": "River",
                                                   "schema": {"type": "object"}}}}),
]  # fmt: skip


def refused_field(body: Body | None) -> str | None:
    """Return the field for which the documentation says 400; None where the request is served."""
    body = body or {}
    format_ = body.get("response_format") or (body.get("text") or {}).get("format") or {}
    if body.get("tools"):
        return "tools"
    if format_.get("type", "text") != "text":
        return "response_format" if "response_format" in body else "text"
    if body.get("suffix"):
        return "suffix"
    if body.get("use_beam_search") and body.get("best_of", body.get("n")) != body.get("n"):
        return "best_of"
    if body.get("use_beam_search") and body.get("logprobs"):
        return "logprobs"
    return None
