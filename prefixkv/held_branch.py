"""Branches that wait for somebody to go on from them: an agent that thinks, a tree search.

Holding is a convenience, never a claim: when running requests need the room, the branch that was
used the longest ago is given up to the cache, where its published blocks stay findable until they
are evicted. To go on from it then computes again what is gone. Nothing else changes.
"""

from array import array
from collections import OrderedDict

from prefixkv.errors import InvalidRequest
from prefixkv.identity import ModelIdentity
from prefixkv.sequence import NO_LIMIT, Sequence


class HeldBranch:
    """A token stream that holds its blocks; shared ones with all that was forked from it.

    Attributes:
        tokens: its ids (typecode "i"), for reading.
        identity: of the model and the salt that it was computed for.
        sequence: its blocks; None once they were given up or released.
        write_limit: tokens of it, and of who goes on from it, that others may find.
    """

    def __init__(
        self,
        holder: "HeldBranches",
        identity: ModelIdentity,
        tokens: "array[int]",
        sequence: Sequence | None,
        write_limit: int,
    ) -> None:
        self.identity = identity
        self.tokens = tokens
        self.sequence = sequence
        self.write_limit = write_limit  # outlives the sequence, which may give way
        self.is_released = False
        self._holder = holder

    def __repr__(self) -> str:
        held = f"{self.num_computed_tokens} computed" if not self.is_released else "released"
        return f"<HeldBranch {len(self.tokens)} tokens, {held}>"

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose K and V it holds; short of the last one sampled, 0 after it gave way."""
        return self.sequence.num_tokens if self.sequence is not None else 0

    def fork(self) -> "HeldBranch":
        """Return another one with the same tokens; shares every block, copies nothing."""
        self.refuse_if_released()
        sequence = self.sequence.fork() if self.sequence is not None else None
        return self._holder.hold(self.identity, self.tokens[:], sequence, self.write_limit)

    def rollback(self, num_tokens: int) -> None:
        """Cut it to its first `num_tokens` tokens; others keep what they share.

        Raises:
            InvalidRequest: if it has fewer, or was released.
        """
        self.refuse_if_released()
        if not 1 <= num_tokens <= len(self.tokens):
            raise InvalidRequest(f"rollback to {num_tokens} of {len(self.tokens)} tokens")
        if self.sequence is not None and num_tokens < self.sequence.num_tokens:
            self.sequence.rollback(num_tokens)
        del self.tokens[num_tokens:]

    def release(self) -> None:
        """Give up the blocks; what is published stays findable. A second release does nothing."""
        self.is_released = True
        self._holder.let_go(self)

    def refuse_if_released(self) -> None:
        """Raise InvalidRequest if it was released."""
        if self.is_released:
            raise InvalidRequest(f"the branch of {len(self.tokens)} tokens was released")


class HeldBranches:
    """All held branches that have their blocks, the one used the longest ago first."""

    def __init__(self) -> None:
        self._by_use: OrderedDict[HeldBranch, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_use)

    def hold(
        self,
        identity: ModelIdentity,
        tokens: "array[int]",
        sequence: Sequence | None,
        write_limit: int = NO_LIMIT,
    ) -> HeldBranch:
        """Hold a sequence, which is theirs from now on; None if it has given way already."""
        held = HeldBranch(self, identity, tokens, sequence, write_limit)
        if sequence is not None:
            self._by_use[held] = None
        return held

    def used(self, held: HeldBranch) -> None:
        """Say that one is gone on from just now."""
        if held in self._by_use:
            self._by_use.move_to_end(held)

    def let_go(self, held: HeldBranch) -> None:
        """Release the blocks of one, if it has them still."""
        self._by_use.pop(held, None)
        # first it has none: a release that is interrupted leaves a sequence that nobody has
        sequence, held.sequence = held.sequence, None
        if sequence is not None:
            sequence.release()

    def give_way(self) -> bool:
        """Let go of the one used the longest ago; False if there is none."""
        held = next(iter(self._by_use), None)
        if held is not None:
            self.let_go(held)
        return held is not None

    def give_all_up(self) -> None:
        """Let go of all."""
        while self.give_way():
            pass

    def sequences(self) -> set[Sequence]:
        """The sequences that are held."""
        return {held.sequence for held in self._by_use if held.sequence is not None}
