"""Log-probabilities of tokens as the model sees them, before any sampling parameter."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from prefixkv.outputs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Log-probabilities on the device; `read` brings them to the host.

    Attributes:
        token_ids, logprobs, ranks: [num_rows], of one token per row.
        top_ids, top_logprobs: [num_rows, largest of num_top].
        num_top: how many of the likeliest tokens are wanted, for each row.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor
    num_top: Sequence[int]

    def read(self) -> list[TokenLogprobs]:
        """Wait for the device."""
        rows = zip(
            self.token_ids.tolist(),
            self.logprobs.tolist(),
            self.ranks.tolist(),
            self.top_ids.tolist(),
            self.top_logprobs.tolist(),
            self.num_top,
            strict=True,
        )
        return [
            TokenLogprobs(
                token, logprob, rank, tuple(zip(top[:count], logprobs[:count], strict=True))
            )
            for token, logprob, rank, top, logprobs, count in rows
        ]


def rows_of_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: Sequence[int]
) -> LogprobRows:
    """Compute the log-probability of one token per row, and of the likeliest ones.

    Only the wanted ones are computed, in float64 for float64 logits and in float32 otherwise. Does
    not wait for the device.

    Args:
        logits: [num_rows, vocab_size]; read only. A row that is not finite gives anything.
        token_ids: int64 [num_rows].
        num_top: how many of the likeliest tokens are wanted, for each row.
    """
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_total = scores.logsumexp(dim=-1, keepdim=True)
    chosen = scores.gather(-1, token_ids[:, None])
    ranks = (scores > chosen).sum(dim=-1) + 1
    values, ids = likeliest(scores, min(max(num_top), scores.shape[-1]))
    return LogprobRows(
        token_ids, (chosen - log_total).squeeze(-1), ranks, ids, values - log_total, num_top
    )


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """Compute as `rows_of_logprobs` does, and wait for it."""
    return rows_of_logprobs(logits, token_ids, num_top).read()


def likeliest(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `count` largest scores of each row and their ids; equals by ascending id."""
    if count == scores.shape[-1]:
        values, ids = scores.sort(dim=-1, descending=True, stable=True)
        return values, ids
    # topk leaves the order of equals open
    ids = scores.topk(count, dim=-1).indices.sort(dim=-1).values
    values, order = scores.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)
