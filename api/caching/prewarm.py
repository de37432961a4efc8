"""`prewarm`: the prompt is computed, and nothing is said."""

from contextlib import aclosing
from dataclasses import replace

from prefixkv.api.generation import Deltas
from prefixkv.sampling_params import SamplingParams


def prewarm_params(params: SamplingParams) -> SamplingParams:
    """Return how to run a prompt for its own sake: the engine always draws a token."""
    return SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=params.prompt_logprobs)


async def prewarmed(deltas: Deltas) -> Deltas:
    """Leave out what was drawn, as if the model had ended at once."""
    async with aclosing(deltas):
        async for prompt, delta in deltas:
            yield (
                prompt,
                replace(
                    delta,
                    text="",
                    token_ids=(),
                    usage=replace(delta.usage, num_completion_tokens=0),
                    finish_reason="stop",
                    stop_reason=None,
                ),
            )
