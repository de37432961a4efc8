"""A real engine that notes the tokens that go in and out; its words can be spelled many ways."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import torch
from tiny_models import CHAT_TEMPLATE, EOS, SPECIAL, tiny_model
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from prefixkv.async_engine import AsyncEngine
from prefixkv.config import EngineConfig
from prefixkv.engine import Engine
from prefixkv.model import LanguageModel
from prefixkv.outputs import OutputDelta
from prefixkv.sampling_params import SamplingParams

LETTERS = "abcdefgh"
PAIRS = [(a, b) for a in LETTERS for b in LETTERS]


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, special tokens, and all pairs of a few letters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL, *alphabet, *(a + b for a, b in PAIRS)]
    backend = Backend(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=PAIRS))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    build: Any = PreTrainedTokenizerFast  # untyped
    wrapped: PreTrainedTokenizerFast = build(
        tokenizer_object=backend, eos_token=EOS, additional_special_tokens=SPECIAL
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


class RecordingEngine(AsyncEngine):
    """Notes the tokens that go in and those that come out."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.prompts: list[list[int]] = []
        self.answers: list[dict[int, list[int]]] = []

    async def generate(
        self, prompt: Sequence[int], params: SamplingParams, **options: Any
    ) -> AsyncIterator[OutputDelta]:
        """Run a request and note it."""
        self.prompts.append(list(prompt))
        answers: dict[int, list[int]] = {}
        self.answers.append(answers)
        async for delta in super().generate(prompt, params, **options):
            answers.setdefault(delta.index, []).extend(delta.token_ids)
            yield delta

    def whole(self, index: int = 0, number: int = -1) -> list[int]:
        """Return the tokens of a request and of one of its answers, without what ended it."""
        answer = self.answers[number][index]
        is_over = answer[-1] == self.tokenizer.eos_token_id
        return self.prompts[number] + (answer[:-1] if is_over else answer)


def recording_engine() -> RecordingEngine:
    """An engine of a tiny random model that knows pairs of letters."""
    tokenizer = merging_tokenizer()
    model = tiny_model()
    torch.manual_seed(1)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    wrapped = LanguageModel.from_transformers(model, tokenizer)
    config = EngineConfig(num_blocks=513, block_size=4)
    return RecordingEngine(Engine(wrapped, config))
