"""The output of one branch: text as it becomes certain, and when it is over."""

from collections.abc import Collection
from copy import copy

from prefixkv.detokenizer import Detokenizer, TokenDecoder
from prefixkv.outputs import FinishReason, OutputDelta, TokenLogprobs
from prefixkv.request import Branch

CONTEXT_TOKENS = 4


class OutputStream:
    """Turns the sampled tokens of a branch into deltas.

    Args:
        eos_token_ids: the model's own end tokens.
    """

    def __init__(
        self, branch: Branch, tokenizer: TokenDecoder, eos_token_ids: Collection[int]
    ) -> None:
        request = branch.request
        params = request.params
        self.branch = branch
        self.request = request
        # a completion goes on where the prompt ends: its last tokens decide about the first space
        context = request.prompt[-CONTEXT_TOKENS:]
        self._detokenizer = Detokenizer(
            tokenizer, params.stop, context, stop_included=params.include_stop_str_in_output
        )
        self._stop_token_ids = frozenset(params.stop_token_ids)
        self._eos_token_ids = frozenset() if params.ignore_eos else frozenset(eos_token_ids)

    def push(self, token_id: int, logprobs: TokenLogprobs | None = None) -> OutputDelta:
        """Add a token that the branch has just appended; a token that ends it has no text.

        `logprobs` are handed on if the request asked for them.
        """
        params, num_tokens = self.request.params, self.branch.num_output_tokens
        reason: FinishReason | None = None
        stop_reason: int | str | None = None
        may_stop = num_tokens > params.min_tokens
        if token_id in self._eos_token_ids or token_id in self._stop_token_ids:
            reason = "stop"
            stop_reason = token_id if token_id in self._stop_token_ids else None
            text = self._ending(token_id)
        else:
            text, stop_reason = self._detokenizer.push(token_id, may_stop=may_stop)
            if stop_reason is not None:
                reason = "stop"
            elif num_tokens >= self.request.max_tokens:
                rest, stop_reason = self._detokenizer.flush(may_stop=may_stop)
                text += rest
                reason = "length" if stop_reason is None else "stop"
        told = (logprobs,) if logprobs is not None and params.logprobs is not None else None
        return self._delta(text, (token_id,), reason, stop_reason, told)

    def _ending(self, token_id: int) -> str:
        """Return the rest of the text, before a token that ends it, or with that if wanted."""
        text, found = "", None
        if self.request.params.include_stop_str_in_output:
            text, found = self._detokenizer.push(token_id)
        return text if found is not None else text + self._detokenizer.flush()[0]

    def _delta(
        self,
        text: str,
        token_ids: tuple[int, ...],
        reason: FinishReason | None,
        stop_reason: int | str | None,
        logprobs: tuple[TokenLogprobs, ...] | None,
    ) -> OutputDelta:
        return OutputDelta(
            self.request.request_id,
            text,
            token_ids,
            copy(self.request.usage),  # who reads it later must not see later counts
            reason,
            stop_reason,
            logprobs=logprobs,
            index=self.branch.index,
        )
