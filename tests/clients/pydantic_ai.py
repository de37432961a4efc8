"""pydantic-ai, which validates responses most strictly."""

import asyncio

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

from tests.clients.conversation import (
    FOLLOW_UP,
    MAX_TOKENS,
    QUESTION,
    Conversation,
    instructions,
    main,
)


def converse(base_url: str, model: str) -> Conversation:
    """Ask plainly, streamed, and once more with the history of the first answer."""
    return asyncio.run(_converse(base_url, model))


async def _converse(base_url: str, model: str) -> Conversation:
    async with OpenAIProvider(base_url=base_url, api_key="none") as provider:
        agent = Agent(
            OpenAIChatModel(model, provider=provider),
            system_prompt=instructions("pydantic-ai"),
            model_settings=ModelSettings(temperature=0, max_tokens=MAX_TOKENS),
        )
        first = await agent.run(QUESTION)
        async with agent.run_stream(QUESTION) as stream:
            streamed = await stream.get_output()
        second = await agent.run(FOLLOW_UP, message_history=first.all_messages())
    usage = first.usage
    return Conversation(
        first.output,
        streamed,
        usage.input_tokens + usage.output_tokens,
        second.usage.cache_read_tokens,
    )


if __name__ == "__main__":
    main(converse)
