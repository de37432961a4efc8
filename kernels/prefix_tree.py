"""The tree of runs that several sequences share, read off their block tables.

Sorted by their block ids, sequences with a common beginning are neighbours. A node is a maximal
range of neighbours, with the part of their common beginning that no larger range has:

    sorted tables     nodes (members, blocks)
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

# columns of a tree's nodes
FIRST, LAST, BEGIN, END = range(4)


def build_tree(
    blocks: Int32Array, offsets: Int64Array, num_shareable: Int64Array, granule: int
) -> tuple[Int64Array, Int64Array]:
    """Find all nodes, of any number of levels.

    A block is shared where its id and all ids before it are equal. Costs O(blocks compared) and
    one sort; next to nothing where all first blocks differ.

    Args:
        blocks: all block tables, one after the other; sequence i's begins at `offsets[i]`.
        num_shareable: blocks at the front of each table that may be shared.
        granule: runs end at multiples of as many blocks.

    Returns: the order, sequence ids; and the nodes, [num_nodes, 4]: members
        `order[FIRST:LAST]`, two or more, and blocks [BEGIN, END) of their tables. A node stands
        after all nodes that begin where it ends.
    """
    members = np.flatnonzero(num_shareable >= granule)
    first_blocks = blocks[offsets[members]].tolist()
    if len(set(first_blocks)) == len(first_blocks):
        return np.empty(0, np.int64), np.empty((0, 4), np.int64)
    # any order will do that keeps common beginnings together, and comparing bytes is the fastest
    table_bytes = memoryview(blocks).cast("B")
    begins = (4 * offsets[members]).tolist()
    ends = (4 * (offsets[members] + num_shareable[members])).tolist()
    keys = [bytes(table_bytes[begin:end]) for begin, end in zip(begins, ends, strict=True)]
    order = members[sorted(range(len(keys)), key=keys.__getitem__)]
    return order, _find_nodes(blocks, offsets, num_shareable, order, granule)


@jit()
def _count_common(
    blocks: Int32Array, offsets: Int64Array, num_shareable: Int64Array, a: int, b: int
) -> int:
    """The number of leading blocks that sequences a and b share."""
    most = min(num_shareable[a], num_shareable[b])
    for i in range(most):
        if blocks[offsets[a] + i] != blocks[offsets[b] + i]:
            return i
    return most


@jit()
def _find_nodes(
    blocks: Int32Array,
    offsets: Int64Array,
    num_shareable: Int64Array,
    order: Int64Array,
    granule: int,
) -> Int64Array:
    """The nodes over sorted sequences: intervals of their common beginnings, on a stack."""
    nodes = np.empty((len(order), 4), np.int64)
    num_nodes = 0
    # open nodes, each longer than the one below: first member and end; the bottom is no node
    stack = np.zeros((len(order) + 1, 2), np.int64)
    top = 0
    for i in range(1, len(order) + 1):
        common = 0
        if i < len(order):
            common = _count_common(blocks, offsets, num_shareable, order[i - 1], order[i])
            common = common // granule * granule
        first = i - 1
        while stack[top, 1] > common:
            first, end = stack[top, 0], stack[top, 1]
            top -= 1
            nodes[num_nodes, FIRST], nodes[num_nodes, LAST] = first, i
            nodes[num_nodes, BEGIN], nodes[num_nodes, END] = max(common, stack[top, 1]), end
            num_nodes += 1
        if stack[top, 1] < common:
            top += 1
            stack[top, 0], stack[top, 1] = first, common
    return nodes[:num_nodes]
