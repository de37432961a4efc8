"""dspy, whose own transport, lm15, is not the openai package."""

from dataclasses import replace

import dspy
from dspy import lm15

from tests.clients.conversation import (
    FOLLOW_UP,
    MAX_TOKENS,
    QUESTION,
    Conversation,
    instructions,
    main,
)


def converse(base_url: str, model: str) -> Conversation:
    """Ask plainly, streamed, and once more behind the first answer."""
    llm = dspy.LM(f"openai/{model}", api_base=base_url, api_key="none", engine="lm15", cache=False)

    def request(*messages: lm15.Message) -> lm15.Request:
        config = lm15.Config(temperature=0, max_tokens=MAX_TOKENS)
        return lm15.Request(f"openai/{model}", messages, instructions("dspy"), config=config)

    question = lm15.Message.user(QUESTION)
    first = llm(request(question))
    streaming = lm15.OpenAIChatLM(api_key="none", base_url=base_url)
    events = streaming.stream(replace(request(question), model=model))
    streamed = "".join(e.delta.text for e in events if isinstance(e, lm15.StreamDeltaEvent))
    second = llm(request(question, first.message, lm15.Message.user(FOLLOW_UP)))
    return Conversation(
        first.message.text or "",
        streamed,
        first.usage.input_tokens + first.usage.output_tokens,
        second.usage.cache_read_tokens,
    )


if __name__ == "__main__":
    main(converse)
