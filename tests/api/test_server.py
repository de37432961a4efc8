"""`prefixkv serve` as a process: the port, signals, and what it prints."""

import re
import signal
import socket
from pathlib import Path

import httpx
import pytest

from prefixkv.api.serving.listener import bind
from prefixkv.errors import ConfigError
from tests.api.live_server import DEADLINE_S
from tests.api.server_process import read_until, serving


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_0(tmp_path: Path, sig: signal.Signals) -> None:
    """It says what to paste, answers that, and ends cleanly."""
    with serving(tmp_path, "--port", "0", "--served-model-name", "it") as process:
        base_url = read_until(process, r"serves it at (http://127\.0\.0\.1:\d+/v1)").group(1)
        read_until(process, rf"curl {base_url}/chat/completions .*\"model\": \"it\"")
        read_until(process, rf'base_url="{base_url}"')
        body = httpx.post(f"{base_url}/completions", json={"prompt": "x"}).json()
        assert body["model"] == "it"
        process.send_signal(sig)
        assert process.stdout is not None
        rest = process.stdout.read()
        assert process.wait(DEADLINE_S) == 0

    assert "Traceback" not in rest


def test_a_signal_while_loading_ends_it_with_0(tmp_path: Path) -> None:
    """A model that loads for minutes does not keep the process."""
    with serving(tmp_path, "--port", "0", FAKE_LOAD_S="60") as process:
        read_until(process, "loading m")
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0


def test_running_streams_get_an_error_when_time_is_up(tmp_path: Path) -> None:
    """After the grace time the engine stops, and its clients are told inside their streams."""
    arguments = ("--port", "0", "--shutdown-timeout", "0.2")
    with serving(tmp_path, *arguments, FAKE_STEP_S="0.05") as process:
        base_url = read_until(process, r"(http://[\d.:]+/v1)").group(1)
        request = {"prompt": "x", "stream": True, "max_tokens": 100_000}
        with httpx.stream("POST", f"{base_url}/completions", json=request) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            *_, error, _, done, _ = lines
        assert "engine_stopped" in error
        assert done == "data: [DONE]"
        assert process.wait(DEADLINE_S) == 0


def test_a_port_in_use_is_told_before_the_model_is_loaded(tmp_path: Path) -> None:
    """One line with host and port, exit code 1."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with serving(tmp_path, "--port", port) as process:
            assert process.stdout is not None
            output = process.stdout.read()
            assert process.wait(DEADLINE_S) == 1

    assert output == f"prefixkv: cannot listen on 127.0.0.1:{port}: Address already in use\n"


def test_a_host_that_is_none_is_told() -> None:
    """An address of nobody, and one of somebody else."""
    for host in ("256.0.0.1", "192.0.2.1"):
        with pytest.raises(ConfigError, match=rf"{re.escape(host)}:0"):
            bind(host, 0)


def test_a_bound_port_refuses_connections_until_it_serves() -> None:
    """Health checks fail fast while the model is loading."""
    with bind("127.0.0.1", 0) as listener:
        address = listener.getsockname()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=5)
