"""From token ids to text, one token at a time.

A token is not a piece of text: it can end inside a character, and whether it starts with a space
may depend on the token before it. So the text of the newest tokens (`pending`) is decoded together
with that of the tokens just before them (`context`), and comes out once it ends on a whole
character. Both runs are short, so a token costs the same however long the output is.
"""

from collections.abc import Collection, Sequence
from typing import Protocol

from prefixkv.stop_strings import StopStrings

_UNFINISHED = "\ufffd"
# an unfinished character is three bytes at most, each of which a decoder may show as one U+FFFD
_MAX_UNFINISHED = 3
# three U+FFFD stand for nine bytes at most, and three more may belong to a character cut in front
_TAIL_TOKENS = 12


class TokenDecoder(Protocol):
    """What a detokenizer needs of a tokenizer."""

    @property
    def special_token_ids(self) -> Collection[int]:
        """Tokens that have no text."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of the tokens; unfinished characters come out as U+FFFD."""
        ...


class Detokenizer:
    """The text of one growing output, cut at the first stop string.

    The texts that `push` and `flush` return add up to what decoding all the tokens at once gives,
    cut at the stop string that is complete first; it does not matter where tokens end.

    Args:
        tokenizer: turns ids into text.
        stop: non-empty strings that end the text.
        context: the last few tokens before the output, where it continues a text rather than
            starting one: they decide about its first space.
        stop_included: the text is cut after the stop string rather than before it.
    """

    def __init__(
        self,
        tokenizer: TokenDecoder,
        stop: Sequence[str] = (),
        context: Sequence[int] = (),
        *,
        stop_included: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._special = tokenizer.special_token_ids
        self._stop = StopStrings(stop, included=stop_included)
        self._pending: list[int] = []
        self._num_out = 0  # characters of the pending text that are out already
        self._set_context([token for token in context if token not in self._special])

    def push(self, token_id: int, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Add a token; return the text that is now certain, and the stop string if one is complete.

        Text that may become a stop string is held back. Requires: no stop string was found yet.

        Args:
            may_stop: whether the token may complete a stop string; if not, it is plain text.
        """
        if token_id in self._special:
            return "", None
        self._pending.append(token_id)
        return self._stop.push(self._take_finished(), may_stop=may_stop)

    def flush(self, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Return what was held back, and the stop string that it completes.

        Requires: no stop string was found before; nothing follows.
        """
        rest = self._pending_text()[self._num_out :]
        self._pending, self._num_out = [], 0
        text, found = self._stop.push(rest, may_stop=may_stop)
        return (text, found) if found is not None else (text + self._stop.flush(), None)

    def _take_finished(self) -> str:
        text = self._pending_text()
        if text.endswith(_UNFINISHED):
            return self._shorten(text) if len(self._pending) >= 2 * _TAIL_TOKENS else ""
        finished = text[self._num_out :]
        # one token may have no text yet, as a lone space at the start of a text; not a dozen
        if text or len(self._pending) >= _TAIL_TOKENS:
            taken, self._pending, self._num_out = self._pending, [], 0
            if text:
                self._set_context(taken)
        return finished

    def _shorten(self, text: str) -> str:
        """Let go of pending tokens although the text does not end on a whole character.

        Without this, tokens that all end inside a character, or bytes that are no text at all,
        would pile up and be decoded again and again. What is left may begin inside a character, so
        what is out of it is counted from its end.
        """
        num_held = min(len(text) - len(text.rstrip(_UNFINISHED)), _MAX_UNFINISHED)
        finished = text[self._num_out : len(text) - num_held]
        self._set_context([])
        self._pending = self._pending[-_TAIL_TOKENS:]
        self._num_out = len(self._pending_text()) - num_held
        return finished

    def _pending_text(self) -> str:
        text = self._tokenizer.decode(self._context + self._pending)
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        # bytes that are no character can spoil those before them, which are out already
        return self._tokenizer.decode(self._pending)

    def _set_context(self, token_ids: list[int]) -> None:
        self._context = token_ids
        self._context_text = self._tokenizer.decode(token_ids)
