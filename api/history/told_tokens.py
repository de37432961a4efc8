"""Which of the tokens of an answer stand for text that the client was told."""

from typing import NamedTuple

from prefixkv.api.engine_interface import Tokenizer
from prefixkv.outputs import BranchOutput


class ToldTokens(NamedTuple):
    """The tokens, the text that they stand for, and the rest of what was told, mostly nothing."""

    token_ids: list[int]
    text: str
    rest: str = ""


def told_tokens(
    output: BranchOutput, tokenizer: Tokenizer, *, stop_included: bool = False
) -> ToldTokens | None:
    """Return what there is to keep of an answer; None for one that did not end well.

    The token that ended it is no part of it. A stop string may end inside a token and begin inside
    another one: the last tokens that count are those before it. So are those before a special one,
    which `ignore_eos` lets through: no text shows it, so it must not come back with the text.

    Args:
        stop_included: whether what stopped the answer is told (`include_stop_str_in_output`).
    """
    ids = output.token_ids
    if output.finish_reason not in ("length", "stop"):
        return None
    is_cut = output.finish_reason == "stop" and (
        isinstance(output.stop_reason, str) or stop_included
    )
    if output.finish_reason == "stop" and not is_cut:
        ids = ids[:-1]
    special = tokenizer.special_token_ids
    num_shown = next((i for i, token_id in enumerate(ids) if token_id in special), len(ids))
    if is_cut or num_shown < len(ids):
        return _until(output.text, ids[:num_shown], tokenizer)
    return ToldTokens(ids, output.text)


def _until(text: str, ids: list[int], tokenizer: Tokenizer) -> ToldTokens:
    """Return the tokens that end at or before the end of `text`, as far as they spell it."""
    told = text.encode()
    num_ids = end = position = 0
    for i, token_id in enumerate(ids):
        piece = tokenizer.token_bytes(token_id)
        if not told.startswith(piece, position):
            break
        position += len(piece)
        if piece and _is_boundary(told, position):
            num_ids, end = i + 1, position
    return ToldTokens(ids[:num_ids], told[:end].decode(), told[end:].decode())


def _is_boundary(data: bytes, position: int) -> bool:
    """Whether no character of UTF-8 goes on at `position`."""
    return position == len(data) or data[position] & 0xC0 != 0x80
