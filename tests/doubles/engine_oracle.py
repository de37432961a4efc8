"""What a real engine is compared with: the plain model of transformers, alone and uncached.

One full forward over some tokens is the reference of all its rows.
"""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as hf
from tiny_models import byte_tokenizer

from prefixkv.beam_search import BeamSearch
from prefixkv.block import TAIL
from prefixkv.model import LanguageModel
from prefixkv.prefix_cache import PrefixCache
from prefixkv.request import Request
from prefixkv.sampling import Sampler, SamplingRow
from prefixkv.sequence import Sequence

Call = Callable[..., Any]
KINDS = ("llama", "mistral")
NAN = float("nan")
TOLERANCE = 1e-9
SIZES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "vocab_size": 8,
    "eos_token_id": 2, "bos_token_id": 0,
}  # fmt: skip


@functools.cache
def plain_model(kind: str, weights: int, dtype: torch.dtype = torch.float64) -> Any:
    """A random model of transformers, untouched; "mistral" has a sliding window of 5."""
    sliding = kind == "mistral"
    config = hf.MistralConfig(**SIZES, sliding_window=5) if sliding else hf.LlamaConfig(**SIZES)
    torch.manual_seed(weights)
    build: Any = hf.AutoModelForCausalLM  # untyped
    model = build.from_config(config, attn_implementation="sdpa").to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.4)  # so that attention is not uniform
    return model


@functools.cache
def served_model(kind: str, dtype: torch.dtype) -> LanguageModel:
    """The model that all engines of a kind run, one after the other; `world` watches it."""
    plain = copy.deepcopy(plain_model(kind, 0, dtype))
    model = LanguageModel.from_transformers(plain, byte_tokenizer())

    def watch(layer: int, name: str, module: Any) -> None:
        module.register_forward_hook(
            lambda _, __, output: vars(model)["world"].after_projection(layer, name, output)
        )

    for layer, module in enumerate(plain.model.layers):
        watch(layer, "keys", module.self_attn.k_proj)
        watch(layer, "values", module.self_attn.v_proj)
    return model


class Oracle:
    """Logits of a request that runs alone and without a cache; computed once."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._rows: dict[tuple[int, tuple[int, ...]], torch.Tensor] = {}

    def row(self, weights: int, tokens: tuple[int, ...]) -> torch.Tensor:
        """Logits after the last of `tokens`; finds those of all its beginnings on the way."""
        if (weights, tokens) not in self._rows:
            with torch.inference_mode():
                model = plain_model(self._kind, weights)
                logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
            for end in range(1, len(tokens) + 1):
                self._rows[weights, tokens[:end]] = logits[end - 1]
        return self._rows[weights, tokens]


oracle_of = functools.cache(Oracle)


@dataclass(frozen=True)
class Fault:
    """What goes wrong in a step: an error at the `which`-th call of a place, or a spoiled row."""

    where: str
    which: int = 0
    error: type[BaseException] = RuntimeError
    value: float = NAN


@dataclass(frozen=True)
class Row:
    """The logits that a step gave for what follows `tokens`."""

    tokens: tuple[int, ...]
    weights: int
    logits: torch.Tensor


@dataclass(frozen=True)
class Draw:
    """The token that a step drew for a branch, behind `tokens`."""

    branch: int
    tokens: tuple[int, ...]
    weights: int
    token_id: int | None


@dataclass(eq=False)
class Watched:
    """A request and what came of it.

    Attributes:
        draws: the last one for each (branch, position).
        told: ids by branch, as its deltas tell them.
        over: branches whose last delta came.
        generation: of its last admission.
    """

    request: Request
    salt: str | None
    rows: list[Row] = field(default_factory=list)
    draws: dict[tuple[int, int], Draw] = field(default_factory=dict)
    told: dict[int, list[int]] = field(default_factory=dict)
    over: set[int] = field(default_factory=set)
    generation: int = -1
    was_interrupted: bool = False

    @property
    def prompt(self) -> tuple[int, ...]:
        """Its token ids."""
        return tuple(self.request.prompt)

    def check_told(self, *, whole: bool) -> None:
        """What was told was drawn in this order, each token behind those told before."""
        request, prompt = self.request, self.prompt
        width = request.params.n
        assert set(self.told) <= set(range(width))
        for branch, told in self.told.items():
            assert len(told) <= request.max_tokens
            if request.in_lockstep:
                continue
            for place, token in enumerate(told):
                draw = self.draws[branch, len(prompt) + place]
                assert (draw.tokens, draw.token_id) == ((*prompt, *told[:place]), token)
        if not whole:
            return
        assert self.over == set(range(width)), f"{request}: the ends of {self.over} were told"
        num_told = sum(map(len, self.told.values()))
        assert request.in_lockstep or num_told == len(self.draws), "a drawn token was not told"
        assert request.usage.num_completion_tokens == num_told

    def compare(self, oracle: Oracle) -> None:
        """All rows with the oracle, and all tokens with what is drawn from the oracle's."""
        request = self.request
        for row in sorted(self.rows, key=lambda row: -len(row.tokens)):
            expected = oracle.row(row.weights, row.tokens)
            error = float((row.logits - expected).abs().max())
            assert error <= TOLERANCE, f"{error} off behind {row.tokens}"
        if self.draws:
            draws = list(self.draws.values())
            expected = torch.stack([oracle.row(draw.weights, draw.tokens) for draw in draws])
            rows = [
                SamplingRow(request.params, request.seed, draw.branch, len(draw.tokens))
                for draw in draws
            ]
            found = [sampled.token_id for sampled in Sampler().sample(expected, rows)]
            assert found == [draw.token_id for draw in draws]

    def replays(self, oracle: Oracle) -> bool:
        """Search again over the oracle's rows; False if the weights changed on the way."""
        begin = max(i for i, row in enumerate(self.rows) if row.tokens == self.prompt)
        first, *others = {row.weights for row in self.rows[begin:]}
        if others:
            return False
        params = self.request.params
        search = BeamSearch(
            width=params.n, max_tokens=self.request.max_tokens, end_token_ids=params.stop_token_ids
        )
        live = [self.prompt]
        while not search.is_done:
            logits = torch.stack([oracle.row(first, tokens) for tokens in live])
            goes_on = search.advance(logits.log_softmax(dim=-1))
            live = [(*live[beam.parent], beam.token_id) for beam in goes_on]
        told = [self.told[index] for index in sorted(self.told)]
        assert told == [hypothesis.token_ids for hypothesis in search.hypotheses()]
        return True


def wrap(owner: object, name: str, around: Callable[..., Any]) -> None:
    """Call `around(method, *arguments)` instead of a method of one object."""
    method = getattr(owner, name)
    setattr(owner, name, lambda *arguments, **named: around(method, *arguments, **named))


def unreadable(cache: PrefixCache) -> torch.Tensor:
    """[num_blocks, block_size]: slots that no published block holds and no sequence computed."""
    size, copies = cache.block_size, cache.pool.copies
    held = {b: len(b.tokens) // 4 for b in cache.pool.blocks if b.state >= TAIL}
    for item in copies.values():
        held[item.source] = max(held.get(item.source, 0), item.num_slots)
    for sequence in cache.sequences:
        block = sequence.last_block
        while block.parent is not None:
            own = min(sequence.num_computed_tokens - (block.depth - 1) * size, size)
            held[block] = max(held.get(block, 0), own)
            block = block.parent
    held.update(dict.fromkeys(copies, 0))  # what is copied there first makes it readable
    ends = [held.get(block, 0) for block in cache.pool.blocks]
    return torch.tensor([[slot >= end for slot in range(size)] for end in ends])


def chain_tokens(sequence: Sequence, num_tokens: int) -> bytes:
    """The first tokens of a sequence, packed, as its blocks have them."""
    block, parts = sequence.last_block, []
    while block.parent is not None:
        parts.append(block.tokens)
        block = block.parent
    return b"".join(reversed(parts))[: num_tokens * 4]
