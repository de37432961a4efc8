"""`prefixkv serve` over the fake engine, as a process."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]


@contextmanager
def serving(tmp_path: Path, *arguments: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    """Run `prefixkv serve` over the fake engine; kill it if the test did not end it."""
    command = [sys.executable, "-m", "tests.api.serve_fake", "serve", "m", *arguments]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        with process:
            yield process
    finally:
        process.kill()


def read_until(process: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    """Return the first match in the output of `process`."""
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if match := re.search(pattern, line):
            return match
    raise AssertionError(f"{pattern!r} is not in: {''.join(seen)}")
