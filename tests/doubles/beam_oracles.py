"""Two other beam searches to compare with: that of transformers, and a naive one on lists."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple
from unittest import mock

import torch
import transformers as hf
from transformers.generation import utils as generation_utils
from transformers.modeling_outputs import CausalLMOutput

from prefixkv.beam_search import BeamSearch

EarlyStopping = bool | Literal["never"]


class Settings(NamedTuple):
    """The arguments of a search."""

    width: int
    max_tokens: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    end_token_ids: tuple[int, ...] = ()


class Outcome(NamedTuple):
    """What a search found, best first, and in how many steps."""

    token_ids: list[list[int]]
    scores: list[float]
    num_steps: int


class _Float64Torch:
    """The torch module, with float64 in place of float32."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def beams_in_float64() -> Iterator[None]:
    """Let transformers keep scores in float64, where it converts everything to float32."""
    with mock.patch.object(generation_utils, "torch", _Float64Torch()):
        yield


class TableModel(hf.PreTrainedModel, hf.GenerationMixin):  # type: ignore[no-untyped-call]
    """Logits looked up in a table [num_rows, vocab_size], by a hash of the whole sequence."""

    config_class = hf.PretrainedConfig

    def __init__(self, table: torch.Tensor) -> None:
        num_rows, vocab_size = table.shape
        config: Any = hf.PretrainedConfig()
        config.vocab_size = vocab_size
        super().__init__(config)
        self.table = torch.nn.Parameter(table, requires_grad=False)
        self.num_rows = num_rows

    def forward(self, input_ids: torch.Tensor, **_: Any) -> CausalLMOutput:
        row = torch.zeros(len(input_ids), dtype=torch.int64)
        for column in input_ids.T:
            row = (row * 31 + column + 1) % 10_007
        return CausalLMOutput(logits=self.table[row % self.num_rows][:, None])


def search_of_transformers(model: Any, prompt: list[int], settings: Settings) -> Outcome:
    """What `transformers.generate` finds. Requires: width >= 2, or it does not search by beams."""
    config: Any = hf.GenerationConfig  # untyped
    steps = 0
    check = generation_utils.GenerationMixin._beam_search_has_unfinished_sequences

    def counted(*arguments: Any) -> Any:
        nonlocal steps
        steps += 1
        return check(*arguments)

    with mock.patch.object(
        type(model), "_beam_search_has_unfinished_sequences", staticmethod(counted)
    ):
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            generation_config=config(
                num_beams=settings.width,
                num_return_sequences=settings.width,
                max_new_tokens=settings.max_tokens,
                length_penalty=settings.length_penalty,
                early_stopping=settings.early_stopping,
                eos_token_id=list(settings.end_token_ids) or None,
                pad_token_id=0,
                do_sample=False,
                use_cache=False,
                output_scores=True,
                return_dict_in_generate=True,
            ),
        )
    lengths = (output.beam_indices >= 0).sum(-1).tolist()  # -1 follows the last token
    sequences = output.sequences[:, len(prompt) :].tolist()
    token_ids = [ids[:length] for ids, length in zip(sequences, lengths, strict=True)]
    return Outcome(token_ids, output.sequences_scores.tolist(), steps)


def search_of_ours(
    model: Any,
    prompt: list[int],
    settings: Settings,
    dtype: torch.dtype = torch.float64,
    watch: Callable[[BeamSearch], None] = lambda search: None,
) -> tuple[BeamSearch, int]:
    """Drive a BeamSearch, computing each beam anew at each step; return it and its steps."""
    search = BeamSearch(**settings._asdict())
    beams = [prompt]
    steps = 0
    while not search.is_done:
        assert search.num_live == len(beams)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor(beams), use_cache=False).logits[:, -1]
        rows = search.advance(logits.to(dtype).log_softmax(-1))
        beams = [[*beams[row.parent], row.token_id] for row in rows]
        steps += 1
        watch(search)
    return search, steps


def outcome(search: BeamSearch, num_steps: int) -> Outcome:
    """What a finished search found."""
    found = search.hypotheses()
    return Outcome([h.token_ids for h in found], [h.score for h in found], num_steps)


def naive_search(
    logprobs_after: Callable[[Sequence[int]], Sequence[float]], settings: Settings
) -> Outcome:
    """Beam search as one would say it, on lists of tokens and with no tensor.

    Requires: no two sums or scores that matter are equal.
    """
    width, max_tokens, penalty, early_stopping, ends = settings
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    finished: list[tuple[float, list[int]]] = []
    length = 0
    while beams:
        length += 1
        ranked = sorted(
            (
                (total + logprob, [*tokens, token])
                for total, tokens in beams
                for token, logprob in enumerate(logprobs_after(tokens))
                if logprob > -math.inf
            ),
            reverse=True,
        )
        has_ended = [tokens[-1] in ends or length == max_tokens for _, tokens in ranked]
        finished += [
            (total / length**penalty, tokens)
            for (total, tokens), ended in zip(ranked[:width], has_ended[:width], strict=True)
            if ended
        ]
        finished = sorted(finished, reverse=True)[:width]
        beams = [beam for beam, ended in zip(ranked, has_ended, strict=True) if not ended][:width]
        if len(finished) == width and beams:
            at = max_tokens if early_stopping == "never" and penalty > 0 else length
            if early_stopping is True or beams[0][0] / at**penalty <= finished[-1][0]:
                break
    return Outcome([tokens for _, tokens in finished], [score for score, _ in finished], length)
