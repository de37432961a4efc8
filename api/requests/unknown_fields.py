"""Fields that no schema knows: ignored, as clients expect, but not silently."""

import logging
from collections.abc import Iterable

MAX_NAMES = 200
MAX_LENGTH = 80

logger = logging.getLogger("prefixkv.api")


class UnknownFields:
    """Logs each name once. Names come from clients, so the memory of them is bounded."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def note(self, names: Iterable[str]) -> None:
        """Log those of `names` that are new; of a long one, only how it begins."""
        for beginning in (name[:MAX_LENGTH] for name in names):
            if beginning not in self._seen and len(self._seen) < MAX_NAMES:
                self._seen.add(beginning)
                logger.info("requests have a field that is ignored: %r", beginning)
