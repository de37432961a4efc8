"""Log-probabilities of tokens as the model sees them, before any sampling parameter."""

from collections.abc import Sequence

import torch

from prefixkv.outputs import TokenLogprobs


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """Return the log-probability of one token per row, and of the likeliest ones.

    Only the wanted ones are computed, in float64 for float64 logits and in float32 otherwise.

    Args:
        logits: [num_rows, vocab_size], finite; read only.
        token_ids: int64 [num_rows].
        num_top: how many of the likeliest tokens are wanted, for each row.
    """
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_total = scores.logsumexp(dim=-1, keepdim=True)
    chosen = scores.gather(-1, token_ids[:, None])
    ranks = (scores > chosen).sum(dim=-1) + 1
    values, ids = likeliest(scores, min(max(num_top), scores.shape[-1]))
    rows = zip(
        token_ids.tolist(),
        (chosen - log_total).squeeze(-1).tolist(),
        ranks.tolist(),
        ids.tolist(),
        (values - log_total).tolist(),
        num_top,
        strict=True,
    )
    return [
        TokenLogprobs(token, logprob, rank, tuple(zip(top[:count], logprobs[:count], strict=True)))
        for token, logprob, rank, top, logprobs, count in rows
    ]


def likeliest(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `count` largest scores of each row and their ids; equals by ascending id."""
    if count == scores.shape[-1]:
        values, ids = scores.sort(dim=-1, descending=True, stable=True)
        return values, ids
    # topk leaves the order of equals open
    ids = scores.topk(count, dim=-1).indices.sort(dim=-1).values
    values, order = scores.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)
