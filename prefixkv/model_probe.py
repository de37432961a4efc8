"""Finds out at load whether a model can be served right, by what it declares and by what it does.

What it declares: a few settings whose meaning is known to need more than causal attention over keys
and values. What it does: a short sequence goes through the model twice, once as the model itself
computes it, once through a small attention of our own, in pieces and packed with another sequence.
Each layer's call is recorded. State beside the KV, positions taken from the place in the batch, or
attention with more to it than was passed to us makes the two differ.
"""

from typing import Any, NamedTuple

import torch

from prefixkv.attention_interface import PROBE_NAME, LayerCall
from prefixkv.errors import ModelError

_LAYER_TYPES = {"full_attention", "sliding_attention"}
# keywords that reach the attention function and do not change what it must compute
_HARMLESS = {
    "cache",
    "dropout",
    "is_causal",
    "output_attentions",
    "output_hidden_states",
    "position_ids",
    "return_dict",
    "sliding_window",
    "use_cache",
}
_NUM_TOKENS = 4
_NUM_TRIES = 3
_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3}
_LOW_PRECISION_TOLERANCE = 5e-2


class AttentionShape(NamedTuple):
    """The attention of a model; the same in all layers but for the windows.

    A layer with window w sees the w newest positions, the row's own included; None means all.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]


def probe(hf_model: Any) -> AttentionShape:
    """Return the shape of the model's attention; switches its attention implementation.

    Raises:
        ModelError: the model cannot be served right; the message says why.
    """
    refuse_declared(hf_model)
    own_attention = hf_model.config._attn_implementation
    if own_attention in (None, PROBE_NAME, "prefixkv"):
        own_attention = "eager"
    for attempt in range(_NUM_TRIES):
        token_ids = _tokens(hf_model, attempt)
        ours, calls = _run_in_pieces(hf_model, token_ids)
        shape = _check_calls(hf_model, calls)
        own = _run_whole(hf_model, token_ids, own_attention)
        error = float((ours - own).abs().max() / own.abs().max().clamp(min=1e-30))
        # an expert that rounding chose differently may explain one difference, not three
        if error <= _TOLERANCE.get(hf_model.dtype, _LOW_PRECISION_TOLERANCE):
            return shape
    raise ModelError(
        f"{_name(hf_model)}: computed in pieces, its logits differ by {error:.2g} of the "
        "largest from its own forward pass; it has state or attention that a KV cache does not hold"
    )


def refuse_declared(hf_model: Any) -> None:
    """Raise ModelError for settings that are known to need what we do not have."""
    config = hf_model.config.get_text_config(decoder=True)
    if getattr(hf_model, "peft_config", None) or getattr(hf_model, "_hf_peft_config_loaded", False):
        raise ModelError(f"{_name(hf_model)} has LoRA adapters, which are not supported yet")
    if hf_model.config.is_encoder_decoder:
        raise ModelError(f"{_name(hf_model)} is an encoder-decoder; only decoders can be served")
    for setting in ("attention_chunk_size", "use_bidirectional_attention"):
        if getattr(config, setting, None):
            value = getattr(config, setting)
            raise ModelError(f"{_name(hf_model)} has {setting}={value}, which is not supported")
    unknown = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if unknown:
        raise ModelError(
            f"{_name(hf_model)} has layers of type {', '.join(sorted(unknown))}; "
            f"only {' and '.join(sorted(_LAYER_TYPES))} can be served"
        )


def _check_calls(hf_model: Any, calls: list[LayerCall]) -> AttentionShape:
    config = hf_model.config.get_text_config(decoder=True)
    num_layers = config.num_hidden_layers
    layers = [getattr(call.module, "layer_idx", None) for call in calls]
    if layers != list(range(num_layers)):
        raise ModelError(
            f"{_name(hf_model)}: attention must run once in each of its {num_layers} layers, in "
            f"order; it ran in layers {layers} (some of its layers keep other state, or compute "
            "attention without transformers' interface)"
        )
    for layer, call in enumerate(calls):
        _check_call(f"{_name(hf_model)} layer {layer}", call)
    windows = tuple(call.keywords.get("sliding_window") for call in calls)
    _check_windows(hf_model, windows)
    shapes = {(c.query.shape[1], c.key.shape[1], c.query.shape[3]) for c in calls}
    if len(shapes) != 1:
        raise ModelError(
            f"{_name(hf_model)}: (heads, KV heads, head size) differ between layers: "
            f"{sorted(shapes)}"
        )
    num_heads, num_kv_heads, head_dim = shapes.pop()
    return AttentionShape(num_heads, num_kv_heads, head_dim, windows)


def _check_call(where: str, call: LayerCall) -> None:
    for name, value in call.keywords.items():
        if name not in _HARMLESS and value is not None and value is not False:
            raise ModelError(f"{where} needs `{name}` in its attention, which is not supported")
    is_causal = call.keywords.get("is_causal")
    if is_causal is None:
        is_causal = getattr(call.module, "is_causal", True)
    if not is_causal:
        raise ModelError(f"{where}: its attention is not causal")
    if call.mask is not None:
        raise ModelError(f"{where} builds an attention mask of its own, which is not supported")
    head_dims = {tensor.shape[-1] for tensor in (call.query, call.key, call.value)}
    if len(head_dims) != 1:
        raise ModelError(
            f"{where}: its queries, keys and values have head sizes {sorted(head_dims)}; "
            "they must be equal"
        )


def _check_windows(hf_model: Any, windows: tuple[int | None, ...]) -> None:
    config = hf_model.config.get_text_config(decoder=True)
    declared = getattr(config, "layer_types", None) or [None] * len(windows)
    for layer, (kind, window) in enumerate(zip(declared, windows, strict=True)):
        if kind is not None and (kind == "sliding_attention") != (window is not None):
            raise ModelError(
                f"{_name(hf_model)} layer {layer} is declared {kind}, but passes "
                f"sliding_window={window} to its attention"
            )
    configured = getattr(config, "sliding_window", None)
    in_use = getattr(config, "use_sliding_window", True)
    if configured and in_use and not any(declared) and not any(windows):
        raise ModelError(
            f"{_name(hf_model)} has sliding_window={configured}, but no layer passes it on"
        )


class _Pieces:
    """Attention over a few tokens of sequences, each row with its sequence and position."""

    def __init__(self) -> None:
        self.calls: list[LayerCall] = []
        self._rows = torch.empty(0, 2, dtype=torch.int64)  # (sequence, position)
        self._num_new = 0
        self._stored: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def begin(self, rows: list[tuple[int, int]]) -> None:
        """Start a forward pass over these (sequence, position) rows."""
        self._rows = torch.cat([self._rows, torch.tensor(rows)])
        self._num_new = len(rows)
        self.calls = []

    def record(self, call: LayerCall) -> torch.Tensor:
        """Keep the call; attend densely to what this and earlier passes stored."""
        layer = len(self.calls)
        self.calls.append(call)
        key, value = call.key, call.value
        if layer in self._stored:
            stored_key, stored_value = self._stored[layer]
            key, value = torch.cat([stored_key, key], 2), torch.cat([stored_value, value], 2)
        self._stored[layer] = (key, value)
        mask = self._visible(call.keywords.get("sliding_window")).to(call.query.device)
        output = torch.nn.functional.scaled_dot_product_attention(
            call.query, key, value, attn_mask=mask, scale=call.scale, enable_gqa=True
        )
        return output.transpose(1, 2)

    def _visible(self, window: int | None) -> torch.Tensor:
        rows = self._rows[-self._num_new :, None]
        same = rows[..., 0] == self._rows[None, :, 0]
        distance = rows[..., 1] - self._rows[None, :, 1]
        return same & (distance >= 0) & (distance < (window or len(self._rows)))


def _run_in_pieces(hf_model: Any, token_ids: torch.Tensor) -> tuple[torch.Tensor, list[LayerCall]]:
    """Return the logits of all tokens, from two packed passes, and the calls of the first."""
    hf_model.set_attn_implementation(PROBE_NAME)
    pieces = _Pieces()
    half = _NUM_TOKENS // 2
    head, tail = list(range(half)), list(range(half, _NUM_TOKENS))
    pieces.begin([(0, position) for position in head])
    _forward(hf_model, token_ids[:half], head, pieces)
    calls = pieces.calls
    # the rest of the sequence, then the beginning of another one with the same tokens
    pieces.begin([(0, position) for position in tail] + [(1, position) for position in head])
    packed = torch.cat([token_ids[half:], token_ids[:half]])
    logits = _forward(hf_model, packed, tail + head, pieces)
    return torch.cat([logits[half:], logits[:half]]), calls


def _run_whole(hf_model: Any, token_ids: torch.Tensor, attention: str) -> torch.Tensor:
    hf_model.set_attn_implementation(attention)
    return _forward(hf_model, token_ids, list(range(_NUM_TOKENS)))


@torch.inference_mode()
def _forward(
    hf_model: Any, token_ids: torch.Tensor, positions: list[int], pieces: _Pieces | None = None
) -> torch.Tensor:
    keywords = {} if pieces is None else {"kv_ctx": pieces}
    position_ids = torch.tensor([positions], device=token_ids.device)
    try:
        output = hf_model(
            input_ids=token_ids[None], position_ids=position_ids, use_cache=False, **keywords
        )
    except Exception as error:  # whatever a model that is not made for this raises
        raise ModelError(f"{_name(hf_model)}: a trial forward pass failed: {error}") from error
    logits: torch.Tensor = output.logits[0]
    return logits


def _tokens(hf_model: Any, attempt: int) -> torch.Tensor:
    """A few ids from the middle of the vocabulary, where no special tokens are."""
    vocab_size = hf_model.config.get_text_config(decoder=True).vocab_size
    ids = [vocab_size * (7 + 3 * i + attempt) // 29 for i in range(_NUM_TOKENS)]
    return torch.tensor(ids, device=hf_model.device)


def _name(hf_model: Any) -> str:
    return type(hf_model).__name__
