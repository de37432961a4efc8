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
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from sortedcontainers import SortedDict

from prefixkv.outputs import PromptLogprob

if TYPE_CHECKING:
    from prefixkv.identity import ModelIdentity

FREE: Final = 0
PRIVATE: Final = 1
TAIL: Final = 2
FULL: Final = 3

STATE_NAMES: Final = ("free", "private", "published tail", "published full")

Siblings: TypeAlias = "Block | SortedDict[bytes, Block]"
"""Published children that share their first token: one inline, more sorted by their tokens."""

Children: TypeAlias = "Block | dict[bytes, Siblings] | None"
"""Published children: almost always none or one, kept inline; else by their first token."""


class BlockLogprobs(NamedTuple):
    """Log-probabilities of tokens in a block (`prompt_logprobs`).

    Attributes:
        tokens: packed; the first of the block's.
        values: one each; None for the first token of a prompt.
        num_top: how many of the likeliest tokens each tells of.
    """

    tokens: bytes
    values: tuple[PromptLogprob, ...]
    num_top: int


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
        logprobs: of its tokens, where a request asked for them (`prompt_logprobs`).
    """

    __slots__ = (
        "block_id", "children", "depth", "digest", "last_use", "logprobs", "parent", "priority",
        "refs", "state", "tokens",
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
        self.logprobs: BlockLogprobs | None = None

    def __repr__(self) -> str:
        state = STATE_NAMES[self.state]
        return f"<Block {self.block_id} {state} depth={self.depth} refs={self.refs}>"

    def learn(self, logprobs: BlockLogprobs | None) -> None:
        """Keep log-probabilities of its tokens, unless those that it has say as much."""
        if logprobs is None or not self.tokens.startswith(logprobs.tokens):
            return
        kept = self.logprobs
        says_as_much = (
            kept is not None
            and kept.num_top >= logprobs.num_top
            and kept.tokens.startswith(logprobs.tokens)
        )
        if not says_as_much:
            self.logprobs = logprobs

    def forget_logprobs_beyond_tokens(self) -> None:
        """Let go of log-probabilities of tokens that it does not hold."""
        if self.logprobs is not None and not self.tokens.startswith(self.logprobs.tokens):
            self.logprobs = None


class Root(Block):
    """Where the chains of one identity begin; holds no tokens and no memory of the pool.

    `state` is FULL while it is open. A closed root lets nothing under it be published.

    Attributes:
        key: the canonical identity, but for the epoch.
        digest: of the identity, epoch included.
        epoch: of the weights that compute what follows.
        identity: what `key` encodes; None for a root that nothing is opened under.
    """

    __slots__ = ("epoch", "identity", "key")

    def __init__(
        self, key: bytes, digest: bytes, epoch: int, identity: "ModelIdentity | None" = None
    ) -> None:
        super().__init__(-1)
        self.identity = identity
        self.key = key
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
        children = parent.children = {children.tokens[:4]: children}
    first = child.tokens[:4]
    siblings = children.get(first)
    if siblings is None:
        children[first] = child
    elif isinstance(siblings, Block):
        children[first] = SortedDict({siblings.tokens: siblings, child.tokens: child})
    else:
        siblings[child.tokens] = child


def remove_child(parent: Block, child: Block) -> None:
    """Undo `add_child`."""
    children = parent.children
    if children is child:
        parent.children = None
        return
    assert isinstance(children, dict)
    first = child.tokens[:4]
    siblings = children[first]
    if siblings is not child:
        assert not isinstance(siblings, Block)
        del siblings[child.tokens]
        if siblings:
            return
    del children[first]
    if not children:
        parent.children = None


def has_child(parent: Block, child: Block) -> bool:
    """Whether the block is findable under its parent."""
    children = parent.children
    if isinstance(children, dict):
        siblings = children.get(child.tokens[:4])
        if isinstance(siblings, dict):
            return siblings.get(child.tokens) is child
        return siblings is child
    return children is child


def published_children(parent: Block) -> list[Block]:
    """All published children, in no particular order."""
    children = parent.children
    if children is None:
        return []
    if isinstance(children, Block):
        return [children]
    found: list[Block] = []
    for siblings in children.values():
        found.extend([siblings] if isinstance(siblings, Block) else siblings.values())
    return found


def any_child(parent: Block) -> Block | None:
    """One of the published children, of those with the newest first token; O(1)."""
    children = parent.children
    if isinstance(children, dict):
        siblings = next(reversed(children.values()))
        return siblings if isinstance(siblings, Block) else next(iter(siblings.values()))
    return children


def longest_common_child(parent: Block, tokens: bytes) -> tuple[Block | None, int]:
    """Find the published child that shares the longest beginning with `tokens`.

    Returns the child and the number of bytes shared, a multiple of a token; (None, 0) if none
    shares a token. Costs O(log children) comparisons: among sorted byte strings the longest common
    beginning is always with a neighbour of where `tokens` would stand.
    """
    found = parent.children
    if isinstance(found, dict):
        found = found.get(tokens[:4])
    if found is None:
        return None, 0
    if isinstance(found, Block):
        shared = common_beginning(found.tokens, tokens)
        return (found, shared) if shared else (None, 0)
    place = found.bisect_left(tokens)
    best, most = None, 0
    for i in range(max(0, place - 1), min(place + 1, len(found))):
        key, child = found.peekitem(i)
        shared = common_beginning(key, tokens)
        if shared > most:
            best, most = child, shared
    return best, most


def common_beginning(a: bytes, b: bytes) -> int:
    """Bytes of the longest common beginning of two packed token strings; a multiple of 4."""
    if a[:4] != b[:4]:
        return 0
    size = min(len(a), len(b))
    differ = int.from_bytes(a[:size], "little") ^ int.from_bytes(b[:size], "little")
    if not differ:
        return size
    lowest_bit = (differ & -differ).bit_length() - 1
    return lowest_bit // 32 * 4
