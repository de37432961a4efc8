"""Sizes as people write them."""

import pytest

from prefixkv.api.options.byte_size import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("4096", 4096),
        ("512M", 512 * 2**20),
        ("2g", 2 * 2**30),
        ("1.5 GiB", 3 * 2**29),
        ("2GB", 2 * 10**9),
        ("10kb", 10_000),
        ("1T", 2**40),
        (" 7B ", 7),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    """Letters alone and iB count in 1024s, B in 1000s."""
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1", "0", "2X", "1e9", "0.1", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    """Nothing is guessed."""
    with pytest.raises(ValueError, match=r"byte|size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("size", "text"), [(1, "1 B"), (46080, "45 KiB"), (2**31, "2 GiB"), (3 * 2**40, "3 TiB")]
)
def test_sizes_are_printed(size: int, text: str) -> None:
    """The largest unit that leaves at least 1."""
    assert format_bytes(size) == text
