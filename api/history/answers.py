"""Whole answers out of deltas, for those who keep them."""

from collections.abc import Callable
from contextlib import aclosing

from prefixkv.api.generation import Deltas
from prefixkv.outputs import BranchOutput, OutputDelta, TokenLogprobs


class GrowingAnswer:
    """Collects the deltas of one branch; a delta costs the same however long the answer is."""

    def __init__(self, index: int = 0) -> None:
        self._output = BranchOutput(index)
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprobs] = []

    def add(self, delta: OutputDelta) -> None:
        """Append a delta."""
        self._texts.append(delta.text)
        self._output.token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            self._logprobs.extend(delta.logprobs)
        if delta.finish_reason is not None:
            self._output.finish_reason = delta.finish_reason
            self._output.stop_reason = delta.stop_reason

    def output(self) -> BranchOutput:
        """Return all of it; nothing may be added afterwards."""
        self._output.text = "".join(self._texts)
        self._output.logprobs = self._logprobs or None
        return self._output


async def noted(deltas: Deltas, note: Callable[[BranchOutput], object]) -> Deltas:
    """Pass the deltas of one prompt on; call `note` with each answer just before its last one.

    Before, so that who has seen the end of an answer finds it noted.
    """
    growing: dict[int, GrowingAnswer] = {}
    async with aclosing(deltas):
        async for prompt, delta in deltas:
            answer = growing.get(delta.index)
            if answer is None:
                answer = growing[delta.index] = GrowingAnswer(delta.index)
            answer.add(delta)
            if delta.finish_reason is not None:
                note(growing.pop(delta.index).output())
            yield prompt, delta
