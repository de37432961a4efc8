"""llama-index-llms-openai-like."""

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

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
    llm = OpenAILike(
        api_base=base_url,
        api_key="none",
        model=model,
        is_chat_model=True,
        temperature=0,
        max_tokens=MAX_TOKENS,
    )
    messages = [
        ChatMessage(role="system", content=instructions("llama-index")),
        ChatMessage(role="user", content=QUESTION),
    ]
    first = llm.chat(messages)
    streamed = "".join(piece.delta or "" for piece in llm.stream_chat(messages))
    second = llm.chat([*messages, first.message, ChatMessage(role="user", content=FOLLOW_UP)])
    return Conversation(
        first.message.content or "",
        streamed,
        first.raw.usage.total_tokens,
        second.raw.usage.prompt_tokens_details.cached_tokens,
    )


if __name__ == "__main__":
    main(converse)
