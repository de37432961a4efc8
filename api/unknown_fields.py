"""Fields that no schema knows: ignored, as clients expect, but not silently."""

import logging
from collections.abc import Iterable

MAX_NAMES = 200

logger = logging.getLogger("prefixkv.api")


class UnknownFields:
    """Logs each name once. Names come from clients, so the memory of them is bounded."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def note(self, names: Iterable[str]) -> None:
        """Log those of `names` that are new."""
        for name in names:
            if name not in self._seen and len(self._seen) < MAX_NAMES:
                self._seen.add(name)
                logger.info("requests have a field that is ignored: %.80r", name)
