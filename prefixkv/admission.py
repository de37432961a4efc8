"""What is refused before it is queued: prompts that are empty, wrong, or too long."""

import numpy as np

from prefixkv.errors import ContextLengthExceeded, InvalidRequest
from prefixkv.sampling_params import SamplingParams


def check_token_ids(packed: bytes, vocab_size: int) -> None:
    """Check a packed prompt.

    Raises:
        InvalidRequest: if it is empty, or holds an id out of [0, vocab_size).
    """
    if not packed:
        raise InvalidRequest("the prompt is empty; it must have at least one token", "prompt")
    ids = np.frombuffer(packed, np.int32)
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if wrong.size:
        raise InvalidRequest(
            f"token id {wrong[0]} is out of the vocabulary, [0, {vocab_size})", "prompt"
        )


def resolve_max_tokens(
    num_prompt_tokens: int, wanted: int | None, max_model_len: int, pool_left: int
) -> int:
    """Return how many tokens may be generated: as many as wanted, else what is left.

    `pool_left` is what the pool leaves behind the prompt.

    Raises:
        ContextLengthExceeded: if prompt and output do not fit into `max_model_len`.
    """
    left = max_model_len - num_prompt_tokens
    if left < 1 or (wanted is not None and wanted > left):
        output = f" and {wanted} output tokens" if wanted is not None else ""
        raise ContextLengthExceeded(
            f"{num_prompt_tokens} prompt tokens{output} do not fit into the context of "
            f"{max_model_len} tokens",
            "prompt",
        )
    if wanted is not None:
        return wanted
    return max(1, min(left, pool_left))


def pool_tokens_left(
    params: SamplingParams, num_prompt_tokens: int, *, num_blocks: int, block_size: int
) -> int:
    """Return how many tokens a branch may have behind the prompt in a pool that is otherwise empty.

    Samples may run one after another. Beams run together, as `Request.num_blocks_at_most` counts.
    """
    if not params.use_beam_search:
        return num_blocks * block_size + 1 - num_prompt_tokens  # the last is not written
    own = (num_blocks - num_prompt_tokens // block_size) // params.n
    return (own - 1) * block_size


def refuse_beside_beams(params: SamplingParams, vocab_size: int) -> None:
    """Refuse what a beam search does not do.

    Raises:
        InvalidRequest: naming the field.
    """
    if params.n > vocab_size:  # then there may be fewer sequences than beams
        raise InvalidRequest(
            f"n is {params.n} with use_beam_search; the vocabulary has {vocab_size} tokens", "n"
        )
    unlike = {
        "presence_penalty": params.presence_penalty != 0,
        "frequency_penalty": params.frequency_penalty != 0,
        "repetition_penalty": params.repetition_penalty != 1,
        "logit_bias": bool(params.logit_bias),
        "allowed_token_ids": params.allowed_token_ids is not None,
        "bad_words": bool(params.bad_words),
        "min_tokens": params.min_tokens > 0,
        "stop": bool(params.stop),
        "logprobs": params.logprobs is not None,
        "prompt_logprobs": params.prompt_logprobs is not None,
    }
    for name, is_set in unlike.items():
        if is_set:
            raise InvalidRequest(f"{name} cannot be combined with use_beam_search", name)
