"""smolagents, which always sends content as a list of parts."""

from smolagents import OpenAIModel
from smolagents.models import ChatMessage, MessageRole

from tests.clients.conversation import (
    FOLLOW_UP,
    MAX_TOKENS,
    QUESTION,
    Conversation,
    instructions,
    main,
)


def message(role: MessageRole, text: str) -> ChatMessage:
    """A message as its agents make them."""
    return ChatMessage(role=role, content=[{"type": "text", "text": text}])


def converse(base_url: str, model: str) -> Conversation:
    """Ask plainly, streamed, and once more behind the first answer."""
    llm = OpenAIModel(
        model_id=model, api_base=base_url, api_key="none", temperature=0, max_tokens=MAX_TOKENS
    )
    messages = [
        message(MessageRole.SYSTEM, instructions("smolagents")),
        message(MessageRole.USER, QUESTION),
    ]
    first = llm.generate(messages)
    streamed = "".join(delta.content or "" for delta in llm.generate_stream(messages))
    answer = message(MessageRole.ASSISTANT, first.content)
    second = llm.generate([*messages, answer, message(MessageRole.USER, FOLLOW_UP)])
    return Conversation(
        first.content,
        streamed,
        first.token_usage.total_tokens,
        second.raw.usage.prompt_tokens_details.cached_tokens,
    )


if __name__ == "__main__":
    main(converse)
