"""The invariants of the cache's books, recomputed from scratch.

Numbered as in docs/design.md. Those that need the content of the slots (5, and 7 for the tensors)
are checked by the tests' oracle; here stands what the books alone must satisfy.
"""

from collections import Counter

from prefixkv.block import FREE, FULL, PRIVATE, TAIL, Block, has_child, published_children
from prefixkv.errors import InvariantViolation
from prefixkv.eviction import rank
from prefixkv.lease import Leases
from prefixkv.prefix_cache import PrefixCache
from prefixkv.sequence import Sequence


def check(cache: PrefixCache) -> None:
    """Check every invariant; O(blocks + sequences).

    Raises:
        InvariantViolation: naming the first one that does not hold.
    """
    _check_states(cache)
    _check_references(cache)
    _check_published(cache)
    for sequence in cache.sequences:
        _check_written(sequence)
    for sequence in cache.sequences:
        _check_chain(sequence)
    _check_eviction_order(cache)
    _check_free(cache)


def check_leases(leases: Leases) -> None:
    """9. Leased blocks are published, referenced, counted once each, and no more than may be.

    Raises:
        InvariantViolation: if they are not.
    """
    name, held = "leases", set[Block]()
    for lease in leases:
        sequence = lease.sequence
        _require(sequence in leases.cache.sequences, 9, name, "{} is not live", sequence)
        block = sequence.last_block
        while block.parent is not None:
            _require(block.state >= TAIL and block.refs > 0, 9, name, "{} is leased", block)
            held.add(block)
            block = block.parent
    counted, bound = leases.num_blocks, leases.max_num_blocks
    _require(counted == len(held), 9, name, "{} blocks counted, {} leased", counted, len(held))
    _require(counted <= bound, 9, name, "{} blocks of at most {}", counted, bound)
    _require(len(leases) <= bound, 9, name, "{} leases of at most {}", len(leases), bound)
    listed = len(list(leases))
    _require(len(leases) == listed, 9, name, "{} known, {} listed", len(leases), listed)


def _require(ok: bool, number: int, name: str, what: str, *about: object) -> None:
    """Raise unless `ok`. Only then is `what` formatted with `about`: a check asks a lot."""
    if not ok:
        raise InvariantViolation(f"invariant {number} ({name}): {what.format(*about)}")


def _check_states(cache: PrefixCache) -> None:
    """1. Each block is in exactly one state; the states add up to the pool."""
    pool = cache.pool
    free = {block.block_id for block in pool.free}
    _require(len(free) == len(pool.free), 1, "states", "a block is free twice")
    _require(0 not in free, 1, "states", "the reserved block is free")
    for block in pool.blocks[1:]:
        is_free = block.block_id in free
        _require(is_free == (block.state == FREE), 1, "states", "{} is free: {}", block, is_free)
    resident = sum(block.state != FREE for block in pool.blocks)
    _require(resident + len(free) == pool.num_usable, 1, "states", "they do not add up")


def _check_references(cache: PrefixCache) -> None:
    """2. refs = sequences that end there + resident children + queued copies that read it."""
    pool = cache.pool
    refs: Counter[Block] = Counter(sequence.last_block for sequence in cache.sequences)
    refs.update(copy.source for copy in pool.copies.values())
    refs.update(b.parent for b in pool.blocks if b.parent is not None)
    blocks = [*pool.blocks, *pool.roots.values(), *(b for b in refs if b.block_id < 0)]
    for block in blocks:
        counted = refs[block]
        _require(block.refs == counted, 2, "references", "{}, counted {}", block, counted)
        unheld = block.state == PRIVATE and not counted
        _require(not unheld, 2, "references", "{} is private and nobody holds it", block)
    for root in pool.roots.values():
        _require(root.refs > 0, 2, "references", "an open root is kept though nobody holds it")


def _check_published(cache: PrefixCache) -> None:
    """3. index[d] = b exactly if b is published full under d; parents are published before."""
    pool, name = cache.pool, "published"
    for digest, block in pool.index.items():
        listed = block.state == FULL and block.digest == digest
        _require(listed, 3, name, "the index holds {} under a digest that is not its own", block)
    for block in pool.blocks:
        if block.state in (FREE, PRIVATE):
            _require(block.digest is None, 3, name, "{} has a digest", block)
            _require(not published_children(block), 3, name, "{} has published children", block)
            continue
        parent = block.parent
        _require(
            parent is not None and parent.state == FULL, 3, name, "{} before {}", parent, block
        )
        assert parent is not None
        _require(
            has_child(parent, block), 3, name, "{} is not found among its parent's children", block
        )
        size = len(block.tokens) // 4
        if block.state == FULL:
            indexed = block.digest is not None and pool.index.get(block.digest) is block
            _require(indexed, 3, name, "{} is not in the index", block)
            _require(size == cache.block_size, 3, name, "{} is full with {} tokens", block, size)
        else:
            _require(0 < size < cache.block_size, 3, name, "{} is a tail of {} tokens", block, size)
            _require(block.digest is None, 3, name, "{} is a tail with a digest", block)
    for parent in (*pool.blocks, *pool.roots.values()):
        for child in published_children(parent):
            own = child.parent is parent and child.state >= TAIL
            _require(own, 3, name, "{} is listed as a published child of {}", child, parent)


def _check_written(sequence: Sequence) -> None:
    """4. A block that the step writes has exactly one referrer and is private."""
    block_size = sequence.cache.block_size
    block = sequence.last_block
    while block.depth * block_size > sequence.num_computed_tokens and block.parent is not None:
        if sequence.num_scheduled_tokens:
            own = block.state == PRIVATE and block.refs == 1
            _require(own, 4, "written blocks", "{} is written by {}", block, sequence)
        block = block.parent


def _check_chain(sequence: Sequence) -> None:
    """5, as far as the books tell: the chain holds a token for each position of the sequence."""
    block_size = sequence.cache.block_size
    name, block = "chain", sequence.last_block
    needed = sequence.num_tokens - (block.depth - 1) * block_size if block.depth else 0
    _require(sequence.num_computed_tokens <= sequence.num_tokens, 5, name, "{}", sequence)
    _require(
        block.depth == 0 or 0 < needed <= block_size, 5, name, "{} ends in {}", sequence, block
    )
    ids = []
    while block.parent is not None:
        ids.append(block.block_id)
        held = len(block.tokens) // 4
        _require(
            held >= needed, 5, name, "{} holds {} tokens of {} of {}", block, held, needed, sequence
        )
        _require(
            block.parent.depth == block.depth - 1, 5, name, "{} follows {}", block, block.parent
        )
        needed, block = block_size, block.parent
    _require(block is sequence.root, 5, name, "{} does not begin at its root", sequence)
    table = sequence.block_table().tolist()
    _require(table == ids[::-1], 5, name, "{} has table {}, chain {}", sequence, table, ids[::-1])


def _check_eviction_order(cache: PrefixCache) -> None:
    """6. The eviction order holds the idle blocks, each once, and by their ranks of now."""
    pool = cache.pool
    listed = [block.block_id for block in pool.order]
    idle = sorted((b for b in pool.blocks if b.state >= TAIL and b.refs == 0), key=rank)
    expected = [block.block_id for block in idle]
    _require(listed == expected, 6, "eviction order", "{} listed, {} idle", listed, expected)


def _check_free(cache: PrefixCache) -> None:
    """7, as far as the books tell: nothing leads to what is free, and it leads nowhere."""
    for block in cache.pool.blocks:
        if block.state == FREE:
            bare = not block.tokens and block.parent is None and block.children is None
            _require(bare, 7, "free blocks", "{} still has tokens, a parent or children", block)
            _require(block.logprobs is None, 7, "free blocks", "{} has log-probabilities", block)
    for copy in cache.pool.copies.values():
        live = copy.source.state != FREE and copy.target.state == PRIVATE
        _require(live, 7, "free blocks", "a copy from {} to {} is queued", copy.source, copy.target)
