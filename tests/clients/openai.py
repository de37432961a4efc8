"""The openai package."""

from typing import Any

import openai

from tests.clients.conversation import (
    FOLLOW_UP,
    MAX_TOKENS,
    QUESTION,
    Conversation,
    instructions,
    main,
)


def converse(base_url: str, model: str) -> Conversation:
    """Ask plainly, streamed, and once more."""
    messages: list[Any] = [
        {"role": "system", "content": instructions("openai")},
        {"role": "user", "content": QUESTION},
    ]
    options: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": MAX_TOKENS}
    with openai.OpenAI(base_url=base_url, api_key="none") as client:
        first = client.chat.completions.create(messages=messages, **options)
        with client.chat.completions.stream(messages=messages, **options) as stream:
            streamed = stream.get_final_completion().choices[0].message.content
        answer = first.choices[0].message
        messages += [answer.to_dict(), {"role": "user", "content": FOLLOW_UP}]
        second = client.chat.completions.create(messages=messages, **options)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    return Conversation(
        answer.content or "",
        streamed or "",
        first.usage.total_tokens,
        second.usage.prompt_tokens_details.cached_tokens or 0,
    )


if __name__ == "__main__":
    main(converse)
