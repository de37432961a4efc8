"""Attention of few query rows over runs of blocks, in numba: decode, and short prefill.

A unit of work is one work item and one kv head. It walks its run in chunks: a chunk's K becomes a
float32 tile in the L1 cache, which every line (query row x head of the group) meets with an online
softmax in base 2; then the same for V. The kernels take the whole C-contiguous pool and the layer
index: a slice of one layer would lose the unit stride, and with it half the speed.

Sizes are run-time variables, so that one compilation per pool dtype serves every model. Generated
source with head_dim and group constant and unrolled took 10-20 % less time on float32 KV that comes
from memory, 30 % less on bfloat16, for a compilation per model and no cache on disk.
"""

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from prefixkv.kernels.jit import Bits, as_float32, exp2, jit
from prefixkv.kernels.plan import (
    BASE_POS,
    BLK_OFF,
    DST_SLOT,
    FINAL,
    ROW_CNT,
    ROW_OFF,
    TOK0,
    TOK1,
    Int32Array,
)

Float32Array = NDArray[np.float32]

# tokens scored before their values are read: K of 64 tokens x 64 dims is 16 KiB
CHUNK_TOKENS = 64
# from here on gathering K and V for a matrix product beats one pass per row
MANY_ROWS = 16


class Inputs(NamedTuple):
    """What a launch reads: `AttentionBackend.attend`'s arguments as numba takes them.

    `query` is [num_tokens, num_heads, head_dim], float32. `pool` is float32, or bfloat16 as uint16.
    `scale` includes log2(e).
    """

    query: Float32Array
    pool: Bits
    layer: int
    work: Int32Array
    rows: Int32Array
    positions: Int32Array
    blocks: Int32Array
    window: int
    scale: np.float32


class Softmax(NamedTuple):
    """Unnormalised attention: acc = sum of 2^(s - peak) V, total = sum of 2^(s - peak).

    [rows, heads, head_dim] and [rows, heads]. Without a visible token: peak -inf, the others 0.
    """

    acc: Float32Array
    peak: Float32Array
    total: Float32Array


@jit()
def _load_tile(
    pool: Bits, where: tuple[int, int, int], run: Int32Array, lo: int, hi: int, tile: Float32Array
) -> None:
    """tile[i] = K or V of the run's token lo + i, up to hi; where = (layer, k_or_v, kv_head)."""
    layer, k_or_v, kv_head = where
    _, num_layers, _, num_kv_heads, block_size, head_dim = pool.shape
    flat_pool, flat_tile = pool.reshape(-1), tile.reshape(-1)
    first = lo
    while first < hi:
        block, slot = run[first // block_size], first % block_size
        last = min(hi, first - slot + block_size)
        # a block's slots of one head are contiguous, so one long loop moves them all
        head = ((block * num_layers + layer) * 2 + k_or_v) * num_kv_heads + kv_head
        source = (head * block_size + slot) * head_dim
        stored = flat_pool[source : source + (last - first) * head_dim]
        loaded = flat_tile[(first - lo) * head_dim :]
        for i in range(len(stored)):
            loaded[i] = as_float32(stored[i])
        first = last


@jit()
def _score(query: Float32Array, keys: Float32Array, lo: int, hi: int, scores: Float32Array) -> None:
    """scores[i] = query . keys[i] for i in [lo, hi)."""
    by_four = lo + (hi - lo) // 4 * 4
    for i in range(lo, by_four, 4):
        s0 = s1 = s2 = s3 = np.float32(0.0)
        for d in range(query.shape[0]):
            s0 += query[d] * keys[i, d]
            s1 += query[d] * keys[i + 1, d]
            s2 += query[d] * keys[i + 2, d]
            s3 += query[d] * keys[i + 3, d]
        scores[i], scores[i + 1], scores[i + 2], scores[i + 3] = s0, s1, s2, s3
    for i in range(by_four, hi):
        s = np.float32(0.0)
        for d in range(query.shape[0]):
            s += query[d] * keys[i, d]
        scores[i] = s


@jit()
def _weigh(scores: Float32Array, lo: int, hi: int, state: Softmax, m: int) -> None:
    """Turn scores[lo:hi] into weights under the new peak, and rescale the row's state to it."""
    old_peak = state.peak[m]
    peak = old_peak
    for i in range(lo, hi):
        peak = max(peak, scores[i])
    added = np.float32(0.0)
    for i in range(lo, hi):
        weight = exp2(scores[i] - peak)
        scores[i] = weight
        added += weight
    if peak == old_peak:
        state.total[m] += added
    else:
        rescale = exp2(old_peak - peak)
        state.peak[m] = peak
        state.total[m] = state.total[m] * rescale + added
        for d in range(state.acc.shape[1]):
            state.acc[m, d] *= rescale


@jit()
def _accumulate(
    weights: Float32Array, values: Float32Array, lo: int, hi: int, acc: Float32Array
) -> None:
    """acc += sum of weights[i] * values[i] for i in [lo, hi)."""
    # four tokens a pass: acc is loaded and stored once for all of them
    by_four = lo + (hi - lo) // 4 * 4
    for i in range(lo, by_four, 4):
        w0, w1, w2, w3 = weights[i], weights[i + 1], weights[i + 2], weights[i + 3]
        for d in range(acc.shape[0]):
            acc[d] += (
                w0 * values[i, d]
                + w1 * values[i + 1, d]
                + w2 * values[i + 2, d]
                + w3 * values[i + 3, d]
            )
    for i in range(by_four, hi):
        w = weights[i]
        for d in range(acc.shape[0]):
            acc[d] += w * values[i, d]


@jit()
def _attend_unit(inputs: Inputs, item: Int32Array, kv_head: int, state: Softmax) -> None:
    """Run one work item for one kv head; line r * group + g of state is row r, head g."""
    num_lines, head_dim = state.acc.shape
    group = num_lines // item[ROW_CNT]
    rows = inputs.rows[item[ROW_OFF] : item[ROW_OFF] + item[ROW_CNT]]
    run = inputs.blocks[item[BLK_OFF] :]
    query = np.empty((num_lines, head_dim), np.float32)
    for m in range(num_lines):
        state.peak[m] = -np.inf
        state.total[m] = 0.0
        for d in range(head_dim):
            head = kv_head * group + m % group
            query[m, d] = inputs.query[rows[m // group], head, d] * inputs.scale
            state.acc[m, d] = 0.0
    tile = np.empty((CHUNK_TOKENS, head_dim), np.float32)
    weights = np.empty((num_lines, CHUNK_TOKENS), np.float32)
    visible = np.empty((num_lines, 2), np.int64)
    for chunk in range(item[TOK0], item[TOK1], CHUNK_TOKENS):
        chunk_end = min(chunk + CHUNK_TOKENS, item[TOK1])
        _load_tile(inputs.pool, (inputs.layer, 0, kv_head), run, chunk, chunk_end, tile)
        for m in range(num_lines):
            last = inputs.positions[rows[m // group]] - item[BASE_POS]
            lo = max(chunk, last - inputs.window + 1) - chunk
            hi = min(chunk_end, last + 1) - chunk
            visible[m, 0], visible[m, 1] = lo, hi
            if lo < hi:
                _score(query[m], tile, lo, hi, weights[m])
                _weigh(weights[m], lo, hi, state, m)
        _load_tile(inputs.pool, (inputs.layer, 1, kv_head), run, chunk, chunk_end, tile)
        for m in range(num_lines):
            lo, hi = visible[m, 0], visible[m, 1]
            if lo < hi:
                _accumulate(weights[m], tile, lo, hi, state.acc[m])


@jit()
def _store(
    item: Int32Array,
    rows: Int32Array,
    kv_head: int,
    state: Softmax,
    out: Float32Array,
    partials: Softmax,
) -> None:
    num_lines, head_dim = state.acc.shape
    group = num_lines // item[ROW_CNT]
    for m in range(num_lines):
        r, head = m // group, kv_head * group + m % group
        total = state.total[m]
        if item[FINAL] != 0:
            share = np.float32(0.0) if total == 0.0 else np.float32(1.0) / total
            for d in range(head_dim):
                out[rows[item[ROW_OFF] + r], head, d] = state.acc[m, d] * share
        else:
            partials.peak[item[DST_SLOT] + r, head] = state.peak[m]
            partials.total[item[DST_SLOT] + r, head] = total
            for d in range(head_dim):
                partials.acc[item[DST_SLOT] + r, head, d] = state.acc[m, d]


@jit()
def _cost(item: Int32Array) -> np.int64:
    """Scores of one item and query head; 0 if the item is gathered (`cpu_prefill.py`)."""
    if item[FINAL] != 0 and item[ROW_CNT] >= MANY_ROWS:
        return np.int64(0)
    return np.int64(1 + item[ROW_CNT] * (item[TOK1] - item[TOK0]))


@jit()
def _attend_share(
    inputs: Inputs, out: Float32Array, partials: Softmax, share: np.int64, num_shares: int
) -> None:
    """Run the units of one of `num_shares` equal shares of the whole cost."""
    num_kv_heads, head_dim = inputs.pool.shape[3], inputs.pool.shape[5]
    group = inputs.query.shape[1] // num_kv_heads
    all_cost = np.int64(0)
    for i in range(len(inputs.work)):
        all_cost += _cost(inputs.work[i]) * num_kv_heads
    done = np.int64(0)
    for i in range(len(inputs.work)):
        item = inputs.work[i]
        cost = _cost(item)
        for kv_head in range(num_kv_heads):
            # a unit belongs to the share in which its middle lies
            middle = 2 * done + cost
            done += cost
            if cost > 0 and middle * num_shares // (2 * all_cost) == share:
                num_lines = item[ROW_CNT] * group
                state = Softmax(
                    np.empty((num_lines, head_dim), np.float32),
                    np.empty(num_lines, np.float32),
                    np.empty(num_lines, np.float32),
                )
                _attend_unit(inputs, item, kv_head, state)
                _store(item, inputs.rows, kv_head, state, out, partials)


@jit(parallel=True)
def attend_kernel(inputs: Inputs, out: Float32Array, partials: Softmax, num_threads: int) -> None:
    """Run all items but those of MANY_ROWS final rows, a share on each thread.

    Writes `out` [num_tokens, num_heads, head_dim] for final items, `partials` for the others.
    Requires: all block ids of the plan lie in the pool.
    """
    # nothing else here: what a parallel function holds is compiled several times over
    for share in numba.prange(num_threads):
        _attend_share(inputs, out, partials, np.int64(share), num_threads)


@jit()
def _merge_head(slots: Int32Array, partials: Softmax, head: int, out: Float32Array) -> None:
    """out [head_dim] = merge of one head's partials in the order listed; 0 if all are empty."""
    peak = np.float32(-np.inf)
    for slot in slots:
        if partials.total[slot, head] != 0.0:
            peak = max(peak, partials.peak[slot, head])
    out[:] = 0.0
    total = np.float32(0.0)
    for slot in slots:
        # an empty partial is skipped: its peak of -inf must not meet another one
        if partials.total[slot, head] != 0.0:
            rescale = exp2(partials.peak[slot, head] - peak)
            total += partials.total[slot, head] * rescale
            for d in range(len(out)):
                out[d] += partials.acc[slot, head, d] * rescale
    if total != 0.0:
        # as `_store` does it: one partial alone gives what a final item would
        share = np.float32(1.0) / total
        for d in range(len(out)):
            out[d] *= share


@jit()
def merge_kernel(
    merge_indptr: Int32Array, merge_slots: Int32Array, partials: Softmax, out: Float32Array
) -> None:
    """Merge the partials of each token that has some into `out`."""
    for token in range(len(merge_indptr) - 1):
        slots = merge_slots[merge_indptr[token] : merge_indptr[token + 1]]
        if len(slots) > 0:
            for head in range(out.shape[1]):
                _merge_head(slots, partials, head, out[token, head])
