"""Response bodies as plain dicts. Keys that clients miss when absent are always there."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from starlette.responses import Response

from prefixkv.api.replies.logprobs import LogprobsBody
from prefixkv.outputs import BranchOutput, Completion, Usage

SYSTEM_FINGERPRINT = f"prefixkv-{version('prefixkv')}"

LIST_PART = 256
DEPTH_OF_LISTS = 4
"""A body has choices, a choice has log-probabilities, which have lists."""

# made once: `json.dumps` makes one for each call, which costs more than a token's text
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class Envelope:
    """What all chunks of one response share."""

    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self, object_: str) -> dict[str, Any]:
        """Return the fields before `choices`."""
        return {
            "id": self.id,
            "object": object_,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": SYSTEM_FINGERPRINT,
        }


def dump_json(value: Any) -> str:
    """Return compact JSON that no line splitter cuts.

    Some clients split streams with `str.splitlines`, which also breaks at these three.
    """
    return _in_one_line(_encode(value))


def dump_long_json(value: Any) -> str:
    """Return the same, long lists encoded a part at a time.

    The encoder lets no other thread run: with megabytes to encode it would hold up the event loop
    even from a thread of its own.
    """
    return _in_one_line("".join(_pieces(value, depth=0)))


def _pieces(value: Any, depth: int) -> Iterator[str]:
    """Encode `value`; deeper than the lists of a choice nothing is long."""
    if isinstance(value, dict) and value and depth <= DEPTH_OF_LISTS:
        opening = "{"
        for key, member in value.items():
            yield f"{opening}{_encode(key)}:"
            yield from _pieces(member, depth + 1)
            opening = ","
        yield "}"
    elif isinstance(value, list) and value and depth <= DEPTH_OF_LISTS:
        opening, is_long = "[", len(value) > LIST_PART
        for start in range(0, len(value), LIST_PART if is_long else 1):
            yield opening
            if is_long:
                yield _encode(value[start : start + LIST_PART])[1:-1]
            else:
                yield from _pieces(value[start], depth + 1)
            opening = ","
        yield "]"
    else:
        yield _encode(value)


def _in_one_line(text: str) -> str:
    if text.isascii():
        return text
    return text.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029").replace("\x85", "\\u0085")


def json_response(body: Any) -> Response:
    """Return a 200 with `body`."""
    return Response(dump_json(body), media_type="application/json")


def long_json_response(body: Any) -> Response:
    """Return the same, made so that it can be made in a thread."""
    return Response(dump_long_json(body), media_type="application/json")


def usage_body(usages: Iterable[Usage]) -> dict[str, Any]:
    """Return the summed usage; both accounts of the cache are there when they are 0 too."""
    totals = list(usages)
    num_prompt = sum(usage.num_prompt_tokens for usage in totals)
    num_completion = sum(usage.num_completion_tokens for usage in totals)
    num_cached = sum(usage.num_cached_tokens for usage in totals)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {
            "cached_tokens": num_cached,
            "cache_write_tokens": sum(usage.num_cache_write_tokens for usage in totals),
        },
    }


def completion_body(
    envelope: Envelope, completions: Sequence[Completion], logprobs: Callable[[int], LogprobsBody]
) -> dict[str, Any]:
    """Return the body of POST /v1/completions; `logprobs` makes the encoder of a choice."""
    choices = [
        {"index": index, "text": output.text, **_ending(output, logprobs(index))}
        for index, output in enumerate(_outputs(completions))
    ]
    return _body(envelope.head("text_completion"), choices, completions)


def chat_body(
    envelope: Envelope, completions: Sequence[Completion], logprobs: Callable[[int], LogprobsBody]
) -> dict[str, Any]:
    """Return the body of POST /v1/chat/completions; `logprobs` as for completions."""
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            **_ending(output, logprobs(index)),
        }
        for index, output in enumerate(_outputs(completions))
    ]
    return _body(envelope.head("chat.completion"), choices, completions)


def _outputs(completions: Sequence[Completion]) -> list[BranchOutput]:
    """Return one output per choice: those of the first prompt, then those of the second."""
    return [output for completion in completions for output in completion.outputs]


def _body(
    head: dict[str, Any], choices: list[dict[str, Any]], completions: Sequence[Completion]
) -> dict[str, Any]:
    usage = usage_body(completion.usage for completion in completions)
    return {**head, "choices": choices, "usage": usage}


def _ending(output: BranchOutput, logprobs: LogprobsBody) -> dict[str, Any]:
    """Return what follows the text. What was ranked has a `score`, which no client asks for by
    name; vLLM ranks in the same order and tells none."""
    entries = output.logprobs
    ending = {
        "logprobs": logprobs(entries) if entries is not None else None,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
    }
    return ending if output.score is None else {**ending, "score": output.score}
