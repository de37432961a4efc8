"""A server as a user starts it: a process of its own, on a free port, with a real engine."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from tiny_models import byte_tokenizer, tiny_model

from prefixkv import default_model

PREFIXKV = str(Path(sys.executable).with_name("prefixkv"))


@dataclass
class Server:
    """A running `prefixkv serve`; what it prints goes to a file."""

    process: subprocess.Popen[bytes]
    log: Path
    base_url: str = ""

    def wait_until_it_serves(self) -> None:
        """Wait for the line that says where; fail with what was printed if it ends before."""
        while self.process.poll() is None:
            if found := re.search(r"serves .* at (http://[\d.]+:\d+)/v1", self.log.read_text()):
                self.base_url = found[1]
                return
            time.sleep(0.05)
        raise AssertionError(f"it ended with {self.process.returncode}: {self.log.read_text()}")

    def stop(self) -> int:
        """Ask it to end, and return its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


def start(log: Path, *arguments: str) -> Server:
    """Start a server on a free port and wait until it serves."""
    command = [PREFIXKV, "serve", *arguments, "--port", "0"]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env={**os.environ, "PYTHONUNBUFFERED": "1"}
        )
    server = Server(process, log)
    try:
        server.wait_until_it_serves()
    except BaseException:
        process.kill()
        process.wait()
        raise
    return server


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model on disk, in float64."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")  # to start one takes 10 s; who counts hits salts
def tiny_server(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the tiny model with a pool of 64 blocks of 4 tokens."""
    log = tmp_path_factory.mktemp("log") / "server.log"
    server = start(log, str(tiny_folder), "--num-blocks", "64", "--block-size", "4")
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
def default_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the default model."""
    default_model.fetch()
    log = tmp_path_factory.mktemp("log") / "server.log"
    server = start(log, "smollm2-135m", "--num-blocks", "512")
    yield server
    assert server.stop() == 0


@pytest.fixture
def client(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    """A client of the server that the test module uses."""
    server: Server = request.getfixturevalue(request.module.SERVER)
    with httpx.Client(base_url=server.base_url, timeout=120) as http:
        yield http
