"""The tree of runs that several sequences share, read off their block tables.

A node is a set of sequences, and the part of their common beginning that no larger set has:

    tables            nodes (members, blocks)
    a  4 7 2 9
    b  4 7 2 5        a b    [2, 3)
    c  4 7 8          a b c  [0, 2)
    d  6 1
"""

import numpy as np
from numpy.typing import NDArray

from prefixkv.kernels.jit import jit
from prefixkv.kernels.plan import Int32Array

Int64Array = NDArray[np.int64]
Integer = int | np.int64

# columns of a tree's nodes
FIRST, LAST, BEGIN, END = range(4)

# ids compared at once, so that the comparison vectorises
_STRIDE = 16
# beyond every block id
_NO_ID = np.int64(2**31)


@jit()
def build_tree(
    blocks: Int32Array, offsets: Int64Array, num_shareable: Int64Array, granule: int
) -> tuple[Int64Array, Int64Array]:
    """Find all nodes, of any number of levels.

    A block is shared where its id and all ids before it are equal. Each table is compared with the
    first of those that share as much, and from where it parts from that one with others that part
    there: O(blocks) in all, and a sort at each parting; all first blocks different: one sort.

    Args:
        blocks: all block tables, one after the other; sequence i's begins at `offsets[i]`.
        num_shareable: blocks at the front of each table that may be shared.
        granule: runs end at multiples of as many blocks.

    Returns: the order, sequence ids; and the nodes, [num_nodes, 4]: members
        `order[FIRST:LAST]`, two or more, and blocks [BEGIN, END) of their tables. A node stands
        after all nodes whose members are among its own.
    """
    order = np.flatnonzero(num_shareable >= granule).astype(np.int64)
    nodes = np.empty((len(order), 4), np.int64)
    num_nodes = np.int64(0)
    # ranges of `order`, and how many blocks their members are known to share
    pending = np.empty((len(order) + 1, 3), np.int64)
    pending[0, 0], pending[0, 1], pending[0, 2] = 0, len(order), 0
    num_pending = np.int64(len(order) > 1)
    while num_pending > 0:
        num_pending -= 1
        first, last, depth = pending[num_pending]
        common, next_ids = _part(blocks, offsets, num_shareable, order[first:last], depth, granule)
        # from those that share least with the first one to those that share most: outer nodes first
        while last > first + 1:
            shared, begin = common[last - 1 - first], last - 1
            while begin > first + 1 and common[begin - 1 - first] == shared:
                begin -= 1
            if shared > depth:
                nodes[num_nodes, FIRST], nodes[num_nodes, LAST] = first, last
                nodes[num_nodes, BEGIN], nodes[num_nodes, END] = depth, shared
                num_nodes += 1
                depth = shared
            # those that part from it at one place, to one block, may share more
            p = begin
            for q in range(begin + 1, last + 1):
                if q == last or next_ids[q - first] != next_ids[p - first]:
                    if q - p > 1 and next_ids[p - first] != _NO_ID:
                        pending[num_pending, 0], pending[num_pending, 1] = p, q
                        pending[num_pending, 2] = shared
                        num_pending += 1
                    p = q
            last = begin
    return order, nodes[:num_nodes][::-1].copy()


@jit()
def _part(
    blocks: Int32Array,
    offsets: Int64Array,
    num_shareable: Int64Array,
    members: Int64Array,
    depth: int,
    granule: int,
) -> tuple[Int64Array, Int64Array]:
    """Sort members by the blocks that they share with the first one, most first, and the next id.

    Returns: both, for each member; the first one is said to share more than any.
    """
    common = np.empty(len(members), np.int64)
    next_ids = np.full(len(members), _NO_ID, np.int64)
    common[0] = 2**29
    first = blocks[offsets[members[0]] :][: num_shareable[members[0]]]
    for m in range(1, len(members)):
        table = blocks[offsets[members[m]] :][: num_shareable[members[m]]]
        common[m] = _count_common(first, table, depth) // granule * granule
        if common[m] + granule <= len(table):
            next_ids[m] = table[common[m]]
    by_key = np.argsort(next_ids - (common << 34), kind="mergesort")
    members[:] = members[by_key]
    return common[by_key], next_ids[by_key]


@jit()
def _count_common(a: Int32Array, b: Int32Array, begin: int) -> int:
    """The length of the common beginning, of which `begin` is known."""
    most = min(len(a), len(b))
    while begin + _STRIDE <= most:
        different = np.int32(0)
        for i in range(begin, begin + _STRIDE):
            different |= a[i] ^ b[i]
        if different != 0:
            break
        begin += _STRIDE
    while begin < most and a[begin] == b[begin]:
        begin += 1
    return begin
