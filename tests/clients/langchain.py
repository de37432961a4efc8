"""langchain-openai."""

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI

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
    llm = ChatOpenAI(
        base_url=base_url,
        model=model,
        api_key=lambda: "none",
        temperature=0,
        max_completion_tokens=MAX_TOKENS,
    )
    messages: list[BaseMessage] = [
        SystemMessage(instructions("langchain")),
        HumanMessage(QUESTION),
    ]
    first = llm.invoke(messages)
    streamed = "".join(str(chunk.content) for chunk in llm.stream(messages))
    second = llm.invoke([*messages, first, HumanMessage(FOLLOW_UP)])
    assert isinstance(first, AIMessage)
    assert isinstance(second, AIMessage)
    assert first.usage_metadata is not None
    assert second.usage_metadata is not None
    return Conversation(
        str(first.content),
        streamed,
        first.usage_metadata["total_tokens"],
        second.usage_metadata["input_token_details"]["cache_read"],
    )


if __name__ == "__main__":
    main(converse)
