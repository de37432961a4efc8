"""What a step of beam search costs, counted: it grows with the width and not with the length."""

import itertools
import sys
import weakref
from types import FrameType
from typing import Any, ClassVar
from unittest import mock

import torch

from prefixkv import beam_search
from prefixkv.beam_search import BeamSearch


def random_logprobs(vocab_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(1, vocab_size, generator=generator).log_softmax(-1)


class CountedNode(beam_search._Node):
    """A node that is counted; `alive` holds those that something still refers to."""

    alive: ClassVar[weakref.WeakSet["CountedNode"]] = weakref.WeakSet()
    num_made = 0
    num_written_out = 0

    def __init__(self, token_id: int, parent: beam_search._Node | None) -> None:
        super().__init__(token_id, parent)
        CountedNode.num_made += 1
        self.alive.add(self)

    def token_ids(self) -> list[int]:
        CountedNode.num_written_out += 1
        return super().token_ids()


def test_a_step_makes_at_most_two_nodes_a_beam_and_reads_no_chain() -> None:
    """Chains deeper than the interpreter's stack are written out at the end, and freed."""
    width, max_tokens = 3, 2000
    logprobs = random_logprobs(8)
    made = [0]
    with mock.patch.object(beam_search, "_Node", CountedNode):
        search = BeamSearch(
            width=width, max_tokens=max_tokens, length_penalty=2.0, end_token_ids=[7]
        )
        while not search.is_done:
            search.advance(logprobs.expand(search.num_live, -1))
            made.append(CountedNode.num_made)
    assert len(made) == max_tokens + 1
    assert max(after - before for before, after in itertools.pairwise(made)) <= 2 * width
    assert len(CountedNode.alive) < CountedNode.num_made  # beams that were given up
    assert CountedNode.num_written_out == 0
    assert max(len(found.token_ids) for found in search.hypotheses()) == max_tokens
    assert CountedNode.num_written_out == width

    del search
    assert not CountedNode.alive


def lines_of_each_step(width: int, num_steps: int) -> list[int]:
    """The lines of beam_search.py that each step runs."""
    lines = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        if frame.f_code.co_filename != beam_search.__file__:
            return None
        lines += event == "line"
        return trace

    search = BeamSearch(width=width, max_tokens=num_steps + 1)
    logprobs = random_logprobs(50)
    counts = []
    before = sys.gettrace()
    for _ in range(num_steps):
        lines = 0
        sys.settrace(trace)
        try:
            search.advance(logprobs.expand(search.num_live, -1))
        finally:
            sys.settrace(before)
        counts.append(lines)
    return counts


def test_a_step_runs_as_many_lines_as_its_width_says() -> None:
    lines = {}
    for width in (4, 8, 16):
        counts = lines_of_each_step(width, 100)
        assert len(set(counts[1:])) == 1  # the first step has one row
        lines[width] = counts[-1]
    assert lines[16] - lines[8] == 2 * (lines[8] - lines[4])
