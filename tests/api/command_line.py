"""The `prefixkv` command, run in the process of a test."""

import pytest

from prefixkv.api import cli


def run(*arguments: str) -> int:
    """Run the command in this process and return its exit code."""
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    code = stopped.value.code
    assert isinstance(code, int)
    return code
