"""The response object of /v1/responses, with every key that clients read."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from prefixkv.api.conversations.response_request import ResponseRequest
from prefixkv.outputs import Usage
from prefixkv.sampling_params import SamplingParams

Status = Literal["in_progress", "completed", "incomplete", "failed"]

_ERROR_CODES: Mapping[int, str] = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
"""OpenAI's types know few codes of failed responses; others are the server's."""


@dataclass(frozen=True, slots=True)
class ResponseObject:
    """What all states of one response share.

    Args:
        name: what its id and that of its message end with.
        params: with the values that count, where the request gave none.
    """

    name: str
    model: str
    request: ResponseRequest
    params: SamplingParams
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def id(self) -> str:
        """The id of the response."""
        return f"resp_{self.name}"

    @property
    def message_id(self) -> str:
        """The id of the one item of its output."""
        return f"msg_{self.name}"

    def body(
        self, status: Status, output: list[dict[str, Any]], usage: Usage | None = None
    ) -> dict[str, Any]:
        """Return the object in one of its states."""
        is_incomplete = status == "incomplete"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_incomplete else None,
            "model": self.model,
            "output": output,
            "usage": response_usage(usage) if usage is not None else None,
            **self._asked(),
        }

    def failed(self, status: int, message: str) -> dict[str, Any]:
        """Return the object of a response that ended with an error of the table, by its status."""
        code = _ERROR_CODES.get(status, "server_error")
        return self.body("failed", []) | {"error": {"code": code, "message": message}}

    def message(self, status: str, text: str, logprobs: list[Any] | None) -> dict[str, Any]:
        """Return the item with the answer."""
        return self.empty_message(status) | {"content": [text_part(text, logprobs)]}

    def empty_message(self, status: str) -> dict[str, Any]:
        """Return the item before it has any content."""
        return {
            "id": self.message_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": [],
        }

    def _asked(self) -> dict[str, Any]:
        """Return what the request said, or what counts where it said nothing."""
        request, params = self.request, self.params
        return {
            "background": False,
            "instructions": request.instructions,
            "max_output_tokens": request.max_completion_tokens,
            "max_tool_calls": None,
            "metadata": request.metadata or {},
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "prompt_cache_key": _if_string(request.prompt_cache_key),
            "reasoning": request.reasoning or {"effort": None, "summary": None},
            "safety_identifier": _if_string(request.safety_identifier),
            "service_tier": "default",
            "store": request.is_stored,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": [],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "user": _if_string(request.user),
        }


def text_part(text: str, logprobs: list[Any] | None) -> dict[str, Any]:
    """Return the content of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}


def response_usage(usage: Usage) -> dict[str, Any]:
    """Return the usage in the words of this endpoint."""
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.num_cached_tokens,
            "cache_write_tokens": usage.num_cache_write_tokens,
        },
        "output_tokens": usage.num_completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
    }


def response_logprobs(content: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a chat's list of log-probabilities as this endpoint has it: `bytes` is never null."""
    return [
        {**_with_bytes(entry), "top_logprobs": [_with_bytes(top) for top in entry["top_logprobs"]]}
        for entry in content
    ]


def _with_bytes(entry: dict[str, Any]) -> dict[str, Any]:
    return {**entry, "bytes": entry["bytes"] or []}


def _if_string(value: Any) -> str | None:
    return value if isinstance(value, str) else None
