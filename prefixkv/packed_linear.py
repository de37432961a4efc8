"""Linear layers with weights in the order in which oneDNN reads them.

On CPUs torch's own float32 product of a few rows (a decoding step) reads weights at a third of the
bandwidth there is; with weights packed once at load it gains the most where layers are wide (the
LM head: 3 times). The packed weights take the place of the plain ones, which are then given up.
`docs/log.md` has the measurements.
"""

import logging
from typing import Any

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)

_NUM_ROWS = 8  # what the packing is chosen for; any number of rows can be multiplied
_TOLERANCE = 1e-3  # of the largest logit; another order of additions makes 1e-6


class PackedLinear(nn.Module):
    """Stands in for a `nn.Linear`; has no `weight`, so that nobody reads or changes a stale one."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _NUM_ROWS)

    def forward(self, rows: Tensor) -> Tensor:
        """Return rows @ weight.T + bias; [..., in_features] to [..., out_features]."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._packed, self.bias, "none", [], ""
        )
        return product


def pack_linears(hf_model: Any) -> bool:
    """Pack the linear layers of a float32 model on a CPU in place; whether that was done.

    A model that reads the weights of its layers by itself is left as it is, and so is one whose
    logits change by more than rounding.
    """
    if hf_model.dtype != torch.float32 or hf_model.device.type != "cpu":
        return False
    plain = {name: module for name, module in hf_model.named_modules() if type(module) is nn.Linear}
    try:
        before = _logits(hf_model)
        for name, linear in plain.items():
            hf_model.set_submodule(name, PackedLinear(linear))
        error = (_logits(hf_model) - before).abs().max() / before.abs().max().clamp(min=1e-30)
        is_close = bool(error <= _TOLERANCE)  # nothing is close to NaN
        reason = None if is_close else f"its logits change by {error:.2g} of the largest"
    except Exception as failure:  # whatever a model does with what it takes for a nn.Linear
        reason = f"{type(failure).__name__}: {failure}"
    if reason is None:
        return True
    for name, linear in plain.items():
        hf_model.set_submodule(name, linear)
    logger.info("%s: its weights are not packed: %s", type(hf_model).__name__, reason)
    return False


@torch.inference_mode()
def _logits(hf_model: Any) -> Tensor:
    vocab_size = hf_model.config.get_text_config(decoder=True).vocab_size
    token_ids = torch.tensor([[vocab_size // 3, vocab_size // 2]])
    logits: Tensor = hf_model(input_ids=token_ids, use_cache=False).logits
    return logits
