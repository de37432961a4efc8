"""Attention of one step: what all layers of one forward pass share."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from prefixkv.kernels.backend import AttentionBackend
from prefixkv.kernels.plan import Plan
from prefixkv.kv_cache import KVCache


class StepAttention:
    """Writes each layer's new K and V, then attends by the plan of that layer's window.

    Built once a step, passed through the model, and dropped. Each layer is attended to once.
    Nothing of it waits for the device, but for `find_finite_rows`.
    """

    __slots__ = ("_backend", "_kv_cache", "_layer_windows", "_plans", "_slots", "_total")

    def __init__(
        self,
        kv_cache: KVCache,
        backend: AttentionBackend,
        slots: Tensor,
        plans: Mapping[int | None, Plan],
        layer_windows: Sequence[int | None],
    ) -> None:
        """Bind the step's tokens to their slots.

        Args:
            slots: int64 [num_tokens], block_id * block_size + offset of each query token; on the
                device of the pool.
            plans: one per distinct window; None is full attention.
            layer_windows: the window of each layer.

        Raises: ValueError if a layer has no plan, or the pool another number of layers.
        """
        if len(layer_windows) != kv_cache.shape.num_layers:
            raise ValueError(f"{len(layer_windows)} windows for {kv_cache.shape.num_layers} layers")
        missing = [window for window in layer_windows if window not in plans]
        if missing:
            raise ValueError(f"no plan for window {missing[0]}, only for {list(plans)}")
        self._kv_cache = kv_cache
        self._backend = backend
        self._slots = slots
        self._plans = plans
        self._layer_windows = layer_windows
        self._total = torch.zeros((), dtype=torch.float64, device=kv_cache.pool.device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Write the layer's K and V of this step, then attend to all that its window sees.

        Args:
            query: [num_tokens, num_heads, head_dim].
            key, value: [num_tokens, num_kv_heads, head_dim], dtype of the pool.
            scale: what q . k is multiplied with before the softmax.

        Returns: [num_tokens, num_heads, head_dim], dtype of `query`.
        """
        pool = self._kv_cache.pool
        self._backend.write_kv(pool, layer, key, value, self._slots)
        self._total += key.sum(dtype=torch.float32) + value.sum(dtype=torch.float32)
        return self._backend.attend(
            pool, layer, query, self._plans[self._layer_windows[layer]], scale
        )

    def find_finite_rows(self) -> Tensor:
        """Return bool [num_tokens]: whether all of a token's K and V is finite, in every layer.

        To be asked when all layers have run. An infinite key of an early layer may give a score of
        -inf, hence a weight of 0: later layers need not show it. Single rows are looked at only if
        the sum over everything says that there is something.
        """
        if torch.isfinite(self._total):
            return torch.ones(len(self._slots), dtype=torch.bool)
        block_size = self._kv_cache.shape.block_size
        blocks, offsets = self._slots // block_size, self._slots % block_size
        rows = self._kv_cache.pool[blocks, :, :, :, offsets]
        return torch.isfinite(rows).flatten(1).all(dim=1)
