"""A text together with the exact tokens that stand for it."""

import sys
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, eq=False)
class Transcript:
    """A chain of parts, each behind its parent, so that what conversations share is there once.

    The tokens need not be those that the tokenizer makes of the text: a model that writes a text
    token by token often cuts it elsewhere.

    Attributes:
        start: characters of the text before this part.
    """

    parent: "Transcript | None"
    text: str
    token_ids: "array[int]"
    start: int = 0
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        size = sys.getsizeof(self.text) + sys.getsizeof(self.token_ids) + 100
        object.__setattr__(self, "num_bytes", size)

    @property
    def end(self) -> int:
        """Characters of the whole text."""
        return self.start + len(self.text)

    @property
    def num_tokens(self) -> int:
        """Tokens of all parts."""
        return sum(len(part.token_ids) for part in self.parts())

    def followed_by(self, text: str, token_ids: Iterable[int]) -> "Transcript":
        """Return this one with a further part."""
        return Transcript(self, text, array("i", token_ids), self.end)

    def parts(self) -> Iterator["Transcript"]:
        """Yield the parts, the last one first."""
        part: Transcript | None = self
        while part is not None:
            yield part
            part = part.parent

    def begins(self, text: str) -> bool:
        """Return whether `text` starts with this one's text."""
        return all(text.startswith(part.text, part.start) for part in self.parts())

    def all_token_ids(self) -> list[int]:
        """Return the tokens of all parts."""
        ids: list[int] = []
        for part in reversed(list(self.parts())):
            ids.extend(part.token_ids)
        return ids


def transcript_of(text: str, token_ids: Iterable[int]) -> Transcript:
    """Return a transcript of one part."""
    return Transcript(None, text, array("i", token_ids))
