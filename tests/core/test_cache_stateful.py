"""The cache against a naive oracle, in every order of operations that Hypothesis can think of."""

from typing import Any

import pytest
from cache_world import DIGESTS, IDENTITIES, Stream, World
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

MAX_STREAMS = 5
tokens = st.lists(st.integers(0, 1), min_size=1, max_size=9)
identities = st.sampled_from(IDENTITIES)


class CacheMachine(RuleBasedStateMachine):
    """Sequences open, grow, fork, roll back, fail and end over a pool that is far too small."""

    digest = "good"

    @initialize(num_blocks=st.integers(3, 12), block_size=st.integers(1, 4))
    def make(self, num_blocks: int, block_size: int) -> None:
        self.world = World(num_blocks, block_size, self.digest)

    def pick(self, data: st.DataObject) -> Stream:
        return data.draw(st.sampled_from(self.world.streams))

    def has_streams(self) -> bool:
        return bool(self.world.streams)

    def has_place(self) -> bool:
        return len(self.world.streams) < MAX_STREAMS

    def may_fork(self) -> bool:
        return 0 < len(self.world.streams) < MAX_STREAMS

    @precondition(has_place)
    @rule(identity=identities, tokens=tokens)
    def open(self, identity: Any, tokens: list[int]) -> None:
        self.world.open(identity, tokens)

    @precondition(may_fork)
    @rule(data=st.data(), tail=tokens)
    def open_continuation(self, data: st.DataObject, tail: list[int]) -> None:
        stream = self.pick(data)
        self.world.open(stream.identity, stream.tokens + tail)

    def step(self, data: st.DataObject, fault: str) -> None:
        world = self.world
        chosen = data.draw(st.lists(st.sampled_from(world.streams), min_size=1, unique_by=id))
        ready = [stream for stream in chosen if self.schedule(data, stream)]
        if data.draw(st.booleans()) and self.has_place():  # admission inside the schedule
            like = data.draw(st.sampled_from(chosen))
            late = world.open(like.identity, [*like.tokens, data.draw(st.integers(0, 1))])
            if self.schedule(data, late):
                ready.append(late)
        if ready and data.draw(st.integers(0, 4)) == 0:  # taken back before the step runs
            unlucky = ready.pop()
            unlucky.sequence.discard()
            if data.draw(st.booleans()):
                world.release(unlucky)
        world.cache.check_invariants()
        world.run(ready, fail_copies=fault == "copies", fail=fault == "forward")
        if fault != "none":
            for stream in ready:
                if data.draw(st.booleans()):
                    world.release(stream)

    # Hypothesis runs all rules about equally often, and leaves out some in each example: what
    # matters most stands here several times

    @precondition(has_streams)
    @rule(data=st.data())
    def step_well(self, data: st.DataObject) -> None:
        self.step(data, "none")

    @precondition(has_streams)
    @rule(data=st.data())
    def step_well_too(self, data: st.DataObject) -> None:
        self.step(data, "none")

    @precondition(has_streams)
    @rule(data=st.data())
    def step_well_as_well(self, data: st.DataObject) -> None:
        self.step(data, "none")

    @precondition(has_streams)
    @rule(data=st.data())
    def step_that_may_fail(self, data: st.DataObject) -> None:
        self.step(data, data.draw(st.sampled_from(["none", "copies", "forward"])))

    @precondition(may_fork)
    @rule(data=st.data())
    def fork_and_step(self, data: st.DataObject) -> None:
        self.world.fork(self.pick(data))
        self.step(data, data.draw(st.sampled_from(["none", "none", "copies", "forward"])))

    def schedule(self, data: st.DataObject, stream: Stream) -> bool:
        sequence = stream.sequence
        while len(stream.tokens) <= sequence.num_tokens:
            stream.tokens.append(data.draw(st.integers(0, 1)))
        num_tokens = data.draw(st.integers(1, len(stream.tokens) - sequence.num_tokens))
        if self.world.schedule(stream, num_tokens):
            return True
        sequence.drop_partial()
        return self.world.schedule(stream, num_tokens)

    @precondition(may_fork)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        self.world.fork(self.pick(data))

    @precondition(has_streams)
    @rule(data=st.data())
    def rollback(self, data: st.DataObject) -> None:
        stream = self.pick(data)
        length = data.draw(st.integers(0, stream.sequence.num_tokens))
        self.world.rollback(stream, length)

    @precondition(has_streams)
    @rule(data=st.data(), cold=st.booleans())
    def release(self, data: st.DataObject, cold: bool) -> None:
        self.world.release(self.pick(data), cold=cold)

    @precondition(has_streams)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.world.preempt(self.pick(data))

    @precondition(has_streams)
    @rule(data=st.data())
    def disturb(self, data: st.DataObject) -> None:
        world = self.world
        kind = data.draw(st.sampled_from(["pressure", "pressure", "reset", "weights changed"]))
        if kind == "reset":
            world.cache.reset()
        elif kind == "weights changed":
            world.weights_changed()
        else:
            wanted = round(data.draw(st.floats(0, 1)) * world.cache.pool.num_usable)
            available = world.num_available()
            assert world.cache.pool.reserve(wanted) == (available >= wanted)

    @invariant()
    def healthy(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish()


@pytest.mark.parametrize("digest", DIGESTS)
def test_no_order_of_operations_breaks_an_invariant(digest: str) -> None:
    """Whatever happens in whatever order, and whatever the digest does, no slot ever lies."""
    machine = type("Machine", (CacheMachine,), {"digest": digest})
    run_state_machine_as_test(machine)
