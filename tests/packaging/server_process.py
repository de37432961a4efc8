"""`prefixkv serve` as a process of its own, of whichever environment the script belongs to."""

import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

DEADLINE_S = 180.0


@dataclass(frozen=True, slots=True)
class Server:
    """A server that has said that it is ready."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path


def clean_environment() -> dict[str, str]:
    """The environment without what points Python at other code, and without our own options."""
    ours = ("PYTHON", "PREFIXKV_")
    kept = {
        name: value
        for name, value in os.environ.items()
        if name == "PREFIXKV_CACHE" or not name.startswith(ours)
    }
    return {**kept, "PYTHONNOUSERSITE": "1", "HF_HUB_OFFLINE": "1"}


@contextmanager
def serving(script: Path, folder: Path, *arguments: str) -> Iterator[Server]:
    """Run `prefixkv serve` on a free port, in `folder`; kill it if the test did not end it."""
    log = folder / "serve.log"
    command = [str(script), "serve", "--port", "0", "--threads", "2", *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=clean_environment(), stdout=output, stderr=output
        )
    with process:
        try:
            yield Server(process, _url(process, log), log)
        finally:
            process.kill()


def _url(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline and process.poll() is None:
        if match := re.search(r"serves .* at (http://127\.0\.0\.1:\d+)/v1", log.read_text()):
            return match[1]
        time.sleep(0.05)
    raise AssertionError(f"the server did not say that it serves: {log.read_text()}")
