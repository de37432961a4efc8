"""Log-probabilities of prompt tokens, kept with the blocks that hold the tokens.

The value of a token belongs to it and all tokens before it, so to a slot of a chain of blocks, like
K and V. Two differences: it comes from the row *before* the token, and only requests that ask
compute it. So for such a request a hit ends one token before the first one without a value.

Values are kept with the tokens that they belong to: after a block was written on otherwise, what no
longer agrees is not read.
"""

from array import array

from prefixkv.block import Block, BlockLogprobs, common_beginning, longest_common_child
from prefixkv.outputs import PromptLogprob
from prefixkv.sequence import Sequence


def recall(
    sequence: Sequence, tokens: "array[int]", known: list[PromptLogprob], num_top: int
) -> None:
    """Extend `known`, the values of the first tokens, by what is kept in the blocks of `sequence`.

    Args:
        sequence: what was matched of `tokens`.
        known: values of tokens[: len(known)]; extended without a gap.
        num_top: what tells of fewer is of no use.
    """
    block_size = sequence.cache.block_size
    chain: list[Block] = []
    block = sequence.last_block
    while block.parent is not None and block.depth * block_size > len(known):
        chain.append(block)
        block = block.parent
    chain.reverse()
    whole = sequence.last_block
    if sequence.num_tokens == whole.depth * block_size:  # the last token may stand in a follower
        follower, _ = longest_common_child(whole, tokens[sequence.num_tokens :].tobytes())
        chain += [follower] if follower is not None else []
    for block in chain:
        first = (block.depth - 1) * block_size
        values = _agreeing(block, tokens[first : first + block_size].tobytes(), num_top)
        if not first <= len(known) < first + len(values):
            return
        known += values[len(known) - first :]


def _agreeing(block: Block, tokens: bytes, num_top: int) -> tuple[PromptLogprob, ...]:
    kept = block.logprobs
    if kept is None or kept.num_top < num_top:
        return ()
    return kept.values[: common_beginning(kept.tokens, tokens) // 4]


def keep(
    sequence: Sequence,
    start: int,
    tokens: "array[int]",
    known: list[PromptLogprob],
    num_top: int,
) -> None:
    """Put the values of tokens [start, ...) into the blocks that were just committed.

    Args:
        sequence: holds a beginning of `tokens`, or more.
        known: values of tokens[: len(known)].
    """
    block_size = sequence.cache.block_size
    end = min(sequence.num_computed_tokens, len(known))
    block = sequence.last_block
    while block.parent is not None and block.depth * block_size > start:
        first = (block.depth - 1) * block_size
        stop = min(end, first + block_size)
        if stop > first:
            own = tokens[first:stop].tobytes()
            block.learn(BlockLogprobs(own, tuple(known[first:stop]), num_top))
        block = block.parent
