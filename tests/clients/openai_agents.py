"""openai-agents, by its model of chat completions."""

import asyncio

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from openai.types.responses import ResponseTextDeltaEvent

from tests.clients.conversation import (
    FOLLOW_UP,
    MAX_TOKENS,
    QUESTION,
    Conversation,
    instructions,
    main,
)


def converse(base_url: str, model: str) -> Conversation:
    """Ask plainly, streamed, and once more with the first run's result as input."""
    set_tracing_disabled(True)
    return asyncio.run(_converse(base_url, model))


async def _converse(base_url: str, model: str) -> Conversation:
    async with AsyncOpenAI(base_url=base_url, api_key="none") as client:
        agent = Agent(
            name="geographer",
            instructions=instructions("openai-agents"),
            model=OpenAIChatCompletionsModel(model=model, openai_client=client),
            model_settings=ModelSettings(temperature=0, max_tokens=MAX_TOKENS),
        )
        first = await Runner.run(agent, QUESTION)
        stream = Runner.run_streamed(agent, QUESTION)
        pieces = [
            event.data.delta
            async for event in stream.stream_events()
            if event.type == "raw_response_event" and isinstance(event.data, ResponseTextDeltaEvent)
        ]
        history = [*first.to_input_list(), {"role": "user", "content": FOLLOW_UP}]
        second = await Runner.run(agent, history)
    return Conversation(
        first.final_output,
        "".join(pieces),
        first.raw_responses[0].usage.total_tokens,
        second.raw_responses[0].usage.input_tokens_details.cached_tokens,
    )


if __name__ == "__main__":
    main(converse)
