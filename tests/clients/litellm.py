"""litellm, by its `openai/` and its `hosted_vllm/` route."""

from typing import Any

import litellm

from tests.clients.conversation import (
    FOLLOW_UP,
    MAX_TOKENS,
    QUESTION,
    Conversation,
    instructions,
    main,
)


def converse(base_url: str, model: str) -> Conversation:
    """Ask plainly, streamed, and once more behind the first answer; by both routes."""
    by_vllm = _converse(base_url, f"hosted_vllm/{model}")
    by_vllm.check()
    return _converse(base_url, f"openai/{model}")


def _converse(base_url: str, model: str) -> Conversation:
    messages: list[Any] = [
        {"role": "system", "content": instructions(f"litellm {model}")},
        {"role": "user", "content": QUESTION},
    ]
    options: dict[str, Any] = {
        "model": model,
        "api_base": base_url,
        "api_key": "none",
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
    }
    first = litellm.completion(messages=messages, **options)
    stream = litellm.completion(messages=messages, stream=True, **options)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    messages += [first.choices[0].message, {"role": "user", "content": FOLLOW_UP}]
    second = litellm.completion(messages=messages, **options)
    return Conversation(
        first.choices[0].message.content,
        streamed,
        first.usage.total_tokens,
        second.usage.prompt_tokens_details.cached_tokens,
    )


if __name__ == "__main__":
    main(converse)
