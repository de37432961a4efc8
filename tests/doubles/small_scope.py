"""Every sequence of operations in a small world, states that look alike visited once.

The world: 3 blocks of 2 slots, 2 sequences, 2 tokens, 2 identities. From each state every operation
is tried: open with every prompt of up to three tokens, a step of either sequence or both with
either next token (run, failed in its copies, failed in its forward, taken back), fork, every
rollback, release (warm and cold), reset, new weights. After each, all invariants are checked, those
of the content too.

States are one if they differ only in block ids, in the order of the two sequences, or in the
clock's absolute value. While nothing is held of either identity, only the first is opened: the
other would lead to the same states with the names exchanged.
"""

import itertools
import pickle
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from cache_world import IDENTITIES, Stream, World

from prefixkv.block import FREE, TAIL, Block

NUM_BLOCKS, BLOCK_SIZE, MAX_STREAMS, MAX_TOKENS = 3, 2, 2, 5
PROMPTS = [list(p) for n in (1, 2, 3) for p in itertools.product((0, 1), repeat=n)]
FATES = ("run", "fail copies", "fail forward", "take back")

Operation = tuple[object, ...]
Path = tuple[Operation, ...]


@dataclass
class Report:
    """How far the enumeration came."""

    num_states: int = 1
    num_operations: int = 0
    depth: int = 0
    states_at_depth: list[int] = field(default_factory=lambda: [1])


def explore(max_depth: int, deadline_s: float) -> Report:
    """Visit all states up to `max_depth` operations away from the empty world, breadth first.

    Stops after a whole depth when the deadline has passed.

    Raises:
        AssertionError: with the operations that lead to it, if anything does not hold.
    """
    report, began = Report(), time.monotonic()
    empty = World(NUM_BLOCKS, BLOCK_SIZE)
    seen = {canonical(empty)}
    frontier: list[tuple[Path, bytes]] = [((), pickle.dumps(empty))]
    while frontier and report.depth < max_depth and time.monotonic() - began < deadline_s:
        successors: list[tuple[Path, bytes]] = []
        for path, saved in frontier:
            for operation in operations(pickle.loads(saved)):
                world = pickle.loads(saved)
                report.num_operations += 1
                apply_and_check(world, operation, path)
                state = canonical(world)
                if state not in seen:
                    seen.add(state)
                    successors.append(((*path, operation), pickle.dumps(world)))
        frontier = successors
        report.depth += 1
        report.states_at_depth.append(len(frontier))
        report.num_states = len(seen)
    return report


def apply_and_check(world: World, operation: Operation, path: Path) -> None:
    """Do one operation more, and check all that must hold."""
    try:
        apply(world, operation)
        world.check()
    except Exception as error:
        raise AssertionError(f"{error} after {(*path, operation)}") from error


def operations(world: World) -> Iterator[Operation]:
    """All operations that make sense in a state."""
    streams = world.streams
    indices = range(len(streams))
    if len(streams) < MAX_STREAMS:
        identities = (0, 1) if streams or world.cache.pool.roots else (0,)
        for identity, prompt in itertools.product(identities, PROMPTS):
            yield ("open", identity, tuple(prompt))
    for chosen in [(i,) for i in indices] + ([(0, 1), (1, 0)] if len(streams) == 2 else []):
        if all(len(streams[i].tokens) < MAX_TOKENS or pending(streams[i]) for i in chosen):
            for tokens, fate in itertools.product(
                itertools.product((0, 1), repeat=len(chosen)), FATES
            ):
                yield ("step", chosen, tokens, fate)
    for i in indices:
        if len(streams) < MAX_STREAMS:
            yield ("fork", i)
        for length in range(streams[i].sequence.num_tokens):
            yield ("rollback", i, length)
        yield ("release", i, False)
        yield ("release", i, True)
    yield ("reset",)
    yield ("weights changed",)


def pending(stream: Stream) -> bool:
    """Whether there are tokens that are not computed yet."""
    return len(stream.tokens) > stream.sequence.num_tokens


def apply(world: World, operation: Operation) -> None:
    """Do one operation."""
    match operation:
        case ("open", int(identity), tuple(prompt)):
            world.open(IDENTITIES[identity], [int(str(t)) for t in prompt])
        case ("step", tuple(chosen), tuple(tokens), str(fate)):
            step(world, [world.streams[int(str(i))] for i in chosen], tokens, fate)
        case ("fork", int(i)):
            world.fork(world.streams[i])
        case ("rollback", int(i), int(length)):
            world.rollback(world.streams[i], length)
        case ("release", int(i), bool(cold)):
            world.release(world.streams[i], cold=cold)
        case ("reset",):
            world.cache.reset()
        case _:
            world.weights_changed()


def step(world: World, chosen: list[Stream], tokens: tuple[object, ...], fate: str) -> None:
    """Schedule all pending tokens of the chosen streams (the given one where there is none)."""
    ready = []
    for stream, token in zip(chosen, tokens, strict=True):
        if not pending(stream):
            stream.tokens.append(int(str(token)))
        sequence = stream.sequence
        num_tokens = len(stream.tokens) - sequence.num_tokens
        if not world.schedule(stream, num_tokens):
            sequence.drop_partial()
            if not world.schedule(stream, len(stream.tokens) - sequence.num_tokens):
                continue
        ready.append(stream)
    world.cache.check_invariants()
    if fate == "take back":
        for stream in ready:
            stream.sequence.discard()
    else:
        world.run(ready, fail_copies=fate == "fail copies", fail=fate == "fail forward")


def canonical(world: World) -> object:
    """A state without what does not matter: see the module's text."""
    pool = world.cache.pool
    blocks = [b for b in pool.blocks if b.state != FREE]
    uses = sorted({b.last_use for b in blocks if b.state >= TAIL})
    ends = Counter(stream.sequence.last_block for stream in world.streams)
    name: dict[Block, object] = {}

    def identify(block: Block) -> object:
        if block not in name:
            if block.parent is None:
                name[block] = (getattr(block, "key", b""), block.state)
            else:
                own = (identify(block.parent), block.tokens, block.state)
                name[block] = (*own, block.refs, ends[block], block in pool.copies)
        return name[block]

    chains = sorted(
        repr((identify(b), b.priority, uses.index(b.last_use) if b.state >= TAIL else -1))
        for b in blocks
    )
    streams = sorted(
        repr((identify(s.sequence.last_block), s.sequence.num_tokens, s.tokens, s.identity.salt))
        for s in world.streams
    )
    copies = [(identify(c.source), identify(c.target), c.num_slots) for c in pool.copies.values()]
    return repr((chains, streams, copies))
