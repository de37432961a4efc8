"""A block: K and V of `block_size` consecutive tokens, as the cache's books see it.

States and the ways between them:

    FREE ──write──> PRIVATE ──commit, full──> FULL ──┐
      ^                │  ^                          ├─ refs 0: idle, evictable ──evict──> FREE
      │                │  └──takeover── TAIL <───────┘
      └────refs 0──────┘                 ^
                       └──release────────┘

PRIVATE is not findable. TAIL and FULL are published: immutable and findable, a FULL block through
the digest index, a TAIL (partly filled, its sequence finished) only among its parent's children.

References point up. `refs` counts the sequences that end here, the resident blocks that follow
here, and the queued copies that read it. A chain is kept alive by its last block alone.
"""

from dataclasses import dataclass
from typing import Final, TypeAlias

from sortedcontainers import SortedDict

FREE: Final = 0
PRIVATE: Final = 1
TAIL: Final = 2
FULL: Final = 3

STATE_NAMES: Final = ("free", "private", "published tail", "published full")

Children: TypeAlias = "Block | dict[bytes, Block] | None"
"""Published children by tokens: one kept inline, few in a dict, many in a SortedDict."""

MAX_UNSORTED_CHILDREN: Final = 8


class Block:
    """One physical block of the pool; see the module's text for its states.

    Attributes:
        block_id: index into the pool's tensor; negative for a root.
        tokens: packed ids of the slots that are written or scheduled, 4 bytes each.
        parent: the block of the preceding tokens; None only for roots and free blocks.
        depth: number of blocks from the start of the sequence to here; 0 for a root.
        digest: of the whole chain; None unless FULL (or a root).
        last_use: logical time of the last release, for the eviction order.
        priority: 0, or lower for what should be evicted first.
    """

    __slots__ = (
        "block_id", "children", "depth", "digest", "last_use", "parent", "priority", "refs",
        "state", "tokens",
    )  # fmt: skip

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.tokens = b""
        self.parent: Block | None = None
        self.refs = 0
        self.state: int = FREE
        self.digest: bytes | None = None
        self.depth = 0
        self.last_use = 0
        self.priority = 0
        self.children: Children = None

    def __repr__(self) -> str:
        state = STATE_NAMES[self.state]
        return f"<Block {self.block_id} {state} depth={self.depth} refs={self.refs}>"


class Root(Block):
    """Where the chains of one identity begin; holds no tokens and no memory of the pool.

    `state` is FULL while it is open. A closed root lets nothing under it be published.
    """

    __slots__ = ("epoch", "identity")

    def __init__(self, identity: bytes, digest: bytes, epoch: int) -> None:
        super().__init__(-1)
        self.identity = identity
        self.digest = digest
        self.epoch = epoch
        self.state = FULL


@dataclass(frozen=True, slots=True, eq=False)
class BlockCopy:
    """A queued copy-on-write: the first `num_slots` slots of `source` go to `target`.

    Copies of a step run in the order of queueing, before any KV write of that step.
    """

    source: Block
    target: Block
    num_slots: int


def add_child(parent: Block, child: Block) -> None:
    """Make a published block findable under its parent."""
    children = parent.children
    if children is None:
        parent.children = child
        return
    if isinstance(children, Block):
        parent.children = {children.tokens: children, child.tokens: child}
        return
    children[child.tokens] = child
    if len(children) > MAX_UNSORTED_CHILDREN and type(children) is dict:
        parent.children = SortedDict(children)


def remove_child(parent: Block, child: Block) -> None:
    """Undo `add_child`."""
    children = parent.children
    if children is child:
        parent.children = None
    else:
        assert isinstance(children, dict)
        removed = children.pop(child.tokens)
        assert removed is child
        if not children:
            parent.children = None


def published_children(parent: Block) -> list[Block]:
    """All published children, in no particular order."""
    children = parent.children
    if children is None:
        return []
    return [children] if isinstance(children, Block) else list(children.values())


def longest_common_child(parent: Block, tokens: bytes) -> tuple[Block | None, int]:
    """Find the published child that shares the longest beginning with `tokens`.

    Returns the child and the number of bytes shared, a multiple of a token; (None, 0) if none
    shares a token. Costs O(log children) comparisons: among sorted byte strings the longest common
    beginning is always with a neighbour of where `tokens` would stand.
    """
    children = parent.children
    if children is None:
        return None, 0
    if isinstance(children, Block):
        candidates = [children]
    elif isinstance(children, SortedDict):
        i = children.bisect_left(tokens)
        keys = children.keys()[max(0, i - 1) : i + 1]
        candidates = [children[key] for key in keys]
    else:
        candidates = list(children.values())
    best, shared = None, 0
    for child in candidates:
        n = common_beginning(child.tokens, tokens)
        if n > shared:
            best, shared = child, n
    return best, shared


def common_beginning(a: bytes, b: bytes) -> int:
    """Bytes of the longest common beginning of two packed token strings; a multiple of 4."""
    size = min(len(a), len(b))
    if a[:size] == b[:size]:
        return size
    low, high = 0, size // 4  # tokens: a[:low] agrees, a[:high] does not
    while high - low > 1:
        middle = (low + high) // 2
        if a[low * 4 : middle * 4] == b[low * 4 : middle * 4]:
            low = middle
        else:
            high = middle
    return low * 4
