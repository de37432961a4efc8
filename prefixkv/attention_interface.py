"""Hooks the attention of transformers' models, so that the engine computes it.

Registered once, under two names: `prefixkv` hands a layer's rows to the `AttentionStep` that
travels with the forward pass as the keyword `kv_ctx`; `prefixkv_probe` hands over everything that
the layer passed, for the checks at load.
"""

from typing import Any, NamedTuple, Protocol

import torch
from transformers import AttentionInterface

NAME = "prefixkv"
PROBE_NAME = "prefixkv_probe"


class AttentionStep(Protocol):
    """Attention of one step, for all layers of a packed batch."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Store the new keys and values, and attend each row to its own sequence up to itself.

        Args:
            layer: index of the layer; each is called once a step, in order.
            query: [num_tokens, num_heads, head_dim], rotary embedding applied; a strided view.
            key: [num_tokens, num_kv_heads, head_dim], rotary embedding applied; a strided view.
            value: as `key`, without the embedding.
            scale: what the scores are multiplied with before the softmax.

        Returns: [num_tokens, num_heads, head_dim].
        """
        ...


class LayerCall(NamedTuple):
    """One call of the attention function, as a model's layer made it.

    query is [1, num_heads, num_tokens, head_dim], key and value [1, num_kv_heads, num_tokens,
    head_dim].
    """

    module: torch.nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    scale: float
    keywords: dict[str, Any]


class CallRecorder(Protocol):
    """What travels as `kv_ctx` under the name `prefixkv_probe`."""

    def record(self, call: LayerCall) -> torch.Tensor:
        """Return the output of the layer's attention, [1, num_tokens, num_heads, head_dim]."""
        ...


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    kv_ctx: AttentionStep,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: int = module.layer_idx  # type: ignore[assignment] # the probe has seen that it is there
    out = kv_ctx.attend(layer, _rows(query), _rows(key), _rows(value), scale)
    return out.unsqueeze(0), None


def _record(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    kv_ctx: CallRecorder,
    scaling: float | None = None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = LayerCall(module, query, key, value, attention_mask, scale, keywords)
    return kv_ctx.record(call), None


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """[1, heads, num_tokens, head_dim] -> [num_tokens, heads, head_dim]."""
    return tensor.squeeze(0).transpose(0, 1)


for _name, _function in ((NAME, _attend), (PROBE_NAME, _record)):
    # without a mask function of the same name no mask is made, and the device is not waited for to
    # make it; who sees whom is for the `AttentionStep` to know
    AttentionInterface.register(_name, _function)
