"""The same requests alone and in company: what they say, to the last bit."""

from collections.abc import Sequence
from typing import Any

import torch
from engine_runs import outputs_of
from tiny_models import byte_tokenizer, tiny_model

from prefixkv.config import EngineConfig
from prefixkv.engine import Engine
from prefixkv.model import LanguageModel
from prefixkv.packed_linear import pack_linears
from prefixkv.sampling_params import SamplingParams

PREFIX = list(range(10, 30))
COMPANY = [[*PREFIX, 100], [*PREFIX, 101], [*PREFIX[:13], 60], [5, 6, 7]]
PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=3, logprobs=5, ignore_eos=True)

Prompts = Sequence[list[int]]
Said = list[tuple[object, ...]]


def make_engine(dtype: torch.dtype, **options: Any) -> Engine:
    """A tiny model as `LanguageModel.load` would leave it: with packed weights, if float32."""
    model = tiny_model(dtype=dtype)
    pack_linears(model)
    config = EngineConfig(**{"num_blocks": 129, "block_size": 4, **options})
    return Engine(LanguageModel.from_transformers(model, byte_tokenizer()), config)


def alone(dtype: torch.dtype, prompts: Prompts = COMPANY, **options: Any) -> list[Said]:
    """Each prompt computed from its first token, as a whole, by an engine that nobody else asks."""
    options["enable_prefix_caching"] = False
    engine = make_engine(dtype, **options)
    return [said for prompt in prompts for said in _say(engine, [prompt])]


def together(dtype: torch.dtype, prompts: Prompts = COMPANY, **options: Any) -> list[Said]:
    """All at once, in chunks of at most 16 tokens; those that share find a beginning computed."""
    engine = make_engine(dtype, max_num_batched_tokens=16, **options)
    _say(engine, [PREFIX])
    return _say(engine, prompts)


def _say(engine: Engine, prompts: Prompts) -> list[Said]:
    """The tokens of each, and the log-probabilities of the likeliest at each step."""
    requests = [engine.add(prompt, PARAMS) for prompt in prompts]
    return [
        [(output.token_ids, output.logprobs) for output in branches]
        for branches in outputs_of(engine, *requests)
    ]
