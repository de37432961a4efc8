"""The output of one request: the streams of its branches, in the order in which they are told."""

from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import replace

from prefixkv.beam_search import BeamSearch, Hypothesis
from prefixkv.detokenizer import TokenDecoder
from prefixkv.output_stream import OutputStream
from prefixkv.outputs import BranchOutput, OutputDelta, PromptLogprob, TokenLogprobs
from prefixkv.request import Branch, Request


class RequestOutput:
    """Collects what the branches of a request say.

    Samples are told as they come. Where they are ranked (`best_of`, beams), nothing is told before
    all are there, and then the best come first.

    Attributes:
        search: the beam search of the request; None unless it has begun.
        over: indices of the branches that have got their last token.
        closing: what is told when all its branches are gone; None unless the request is over.
    """

    def __init__(
        self, request: Request, tokenizer: TokenDecoder, eos_token_ids: Collection[int]
    ) -> None:
        self.request = request
        self.search: BeamSearch | None = None
        self.closing: list[OutputDelta] | None = None
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self.over: set[int] = set()
        self._streams: dict[int, OutputStream] = {}
        self._drawn: dict[int, _Sample] = {}

    @property
    def begun(self) -> Collection[int]:
        """Indices of the branches that have got a token."""
        return self._streams.keys()

    @property
    def has_failed(self) -> bool:
        """Whether the request ends with an error."""
        return any(delta.error is not None for delta in self.closing or ())

    def push(
        self, branch: Branch, token_id: int, logprobs: TokenLogprobs | None
    ) -> list[OutputDelta]:
        """Add a token that a branch has just appended; returns what is to be told now."""
        stream = self._streams.get(branch.index) or self._stream(branch)
        stream.branch = branch
        delta = stream.push(token_id, logprobs)
        if not self._streams:
            delta = replace(delta, prompt_logprobs=self._prompt_logprobs())
        self._streams[branch.index] = stream  # not before, as the first token may be taken back
        if delta.finish_reason is not None:
            self.over.add(branch.index)
        if self.request.params.is_ranked:
            sample = self._drawn.setdefault(branch.index, _Sample(branch.index))
            sample.add(delta)
            sample.sum_logprobs += logprobs.logprob if logprobs is not None else 0.0
            return []
        return [delta]

    def ranked_samples(self) -> list[OutputDelta]:
        """Tell the best `n` of all that were drawn, by their mean log-probability."""
        best = sorted(self._drawn.values(), key=lambda sample: -sample.mean_logprob)
        return [
            self._whole(sample, index, sample.mean_logprob)
            for index, sample in enumerate(best[: self.request.params.n])
        ]

    def begin_search(self) -> BeamSearch:
        """Begin the beam search, or begin it anew after a preemption."""
        params = self.request.params
        end_tokens = {*params.stop_token_ids, *(() if params.ignore_eos else self._eos_token_ids)}
        self.search = BeamSearch(
            width=params.n,
            max_tokens=self.request.max_tokens,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            end_token_ids=end_tokens,
        )
        return self.search

    def beams(self, hypotheses: Sequence[Hypothesis]) -> list[OutputDelta]:
        """Tell what a search has found."""
        decoded = [self._decode(hypothesis) for hypothesis in hypotheses]
        # not before, as decoding may be interrupted, and is run again then
        self.request.usage.num_completion_tokens += sum(len(h.token_ids) for h in hypotheses)
        return [
            self._whole(output, index, hypothesis.score)
            for index, (output, hypothesis) in enumerate(zip(decoded, hypotheses, strict=True))
        ]

    def _decode(self, hypothesis: Hypothesis) -> BranchOutput:
        branch, output = Branch(self.request, 0), BranchOutput()
        stream = self._stream(branch)
        for token_id in hypothesis.token_ids:
            branch.append(token_id)
            output.add(stream.push(token_id))
        assert output.finish_reason == hypothesis.finish_reason
        return output

    def _stream(self, branch: Branch) -> OutputStream:
        return OutputStream(branch, self._tokenizer, self._eos_token_ids)

    def _whole(self, output: BranchOutput, index: int, score: float) -> OutputDelta:
        """All of a ranked output at once."""
        return OutputDelta(
            self.request.request_id,
            output.text,
            tuple(output.token_ids),
            copy(self.request.usage),
            output.finish_reason,
            output.stop_reason,
            logprobs=tuple(output.logprobs) if output.logprobs is not None else None,
            index=index,
            score=score,
            prompt_logprobs=self._prompt_logprobs() if index == 0 else None,
        )

    def _prompt_logprobs(self) -> tuple[PromptLogprob, ...] | None:
        count = self.request.num_top_prompt_logprobs  # what others had computed may tell of more
        return (
            tuple(
                value and value._replace(top=value.top[:count])
                for value in self.request.prompt_logprobs
            )
            or None
        )

    def fail(self, error: str) -> OutputDelta:
        """End the request because its step failed."""
        usage = copy(self.request.usage)
        return OutputDelta(self.request.request_id, "", (), usage, "error", error=error)


class _Sample(BranchOutput):
    """A sample that waits for the others."""

    sum_logprobs = 0.0

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of its tokens."""
        return self.sum_logprobs / len(self.token_ids)
