"""Amounts of memory as people write them."""

import re

_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?B)?", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Return the bytes that `text` means: 4096, 512M, 1.5G, 2GiB count in 1024s, 2GB in 1000s.

    Raises:
        ValueError: not a positive size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size like 4096, 512M, 2G or 2GB")
    number, unit, suffix = match.groups()
    base = 1000 if (suffix or "").upper() == "B" else 1024
    size = int(float(number) * base ** _UNITS[unit.upper()])
    if size < 1:
        raise ValueError(f"{text!r} is less than one byte")
    return size


def format_bytes(size: int) -> str:
    """Return `size` in the largest binary unit that leaves a number of at least 1."""
    amount = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.4g} {unit}"
        amount /= 1024
    return f"{amount:.4g} TiB"
