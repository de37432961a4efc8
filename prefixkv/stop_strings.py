"""Finds stop strings in a growing text (Knuth-Morris-Pratt, one automaton a string)."""

from collections.abc import Sequence


class StopStrings:
    """Cuts a growing text before the stop string that is complete first.

    Of several that end at the same character the longest counts. "First complete" rather than
    "first begun": the output ends as soon as a stop string has appeared, without waiting whether a
    longer one, begun earlier, would have been completed too.

    Args:
        stop: non-empty strings.
        included: cut after the stop string instead, so that nothing needs to be held back.
    """

    def __init__(self, stop: Sequence[str], *, included: bool = False) -> None:
        # the longest first, so that it is the one found among those that end together
        self._patterns = [_Pattern(text) for text in sorted(set(stop), key=len, reverse=True)]
        self._included = included
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Add text; return what cannot become part of a stop string, and the one now complete.

        With `may_stop` False a stop string that this text completes is text like any other.
        """
        if not self._patterns:
            return text, None
        buffer = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            for pattern in self._patterns:
                pattern.advance(char)
            for pattern in self._patterns:
                if not pattern.is_complete:
                    continue
                if may_stop:
                    self._held = ""
                    cut = end if self._included else end - len(pattern.text)
                    return buffer[:cut], pattern.text
                pattern.go_on()
        num_held = max(pattern.num_matched for pattern in self._patterns)
        if self._included:
            num_held = 0
        num_free = len(buffer) - num_held
        self._held = buffer[num_free:]
        return buffer[:num_free], None

    def flush(self) -> str:
        """Return the text that was held back, which is no stop string after all."""
        held, self._held = self._held, ""
        return held


class _Pattern:
    """Where one string stands: `num_matched` of its first characters end the text so far."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        self._fallback = [0, 0]  # [n]: the longest proper border of the first n characters
        for char in text[1:]:
            self._fallback.append(self._next(self._fallback[-1], char))

    @property
    def is_complete(self) -> bool:
        return self.num_matched == len(self.text)

    def advance(self, char: str) -> None:
        self.num_matched = self._next(self.num_matched, char)

    def go_on(self) -> None:
        """Look for the next occurrence, which may overlap the one that is complete."""
        self.num_matched = self._fallback[self.num_matched]

    def _next(self, num_matched: int, char: str) -> int:
        while num_matched and self.text[num_matched] != char:
            num_matched = self._fallback[num_matched]
        return num_matched + 1 if self.text[num_matched] == char else 0
