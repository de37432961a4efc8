"""The end of a server: what runs is finished, what comes is sent elsewhere, all can see it."""

import signal
import time
from pathlib import Path

import httpx

from tests.api.live_server import DEADLINE_S, eventually
from tests.api.server_process import read_until, serving
from tests.api.test_errors import error_of

STREAM = {"prompt": "x", "stream": True, "max_tokens": 40}
ENDLESS = {"prompt": "x", "stream": True, "max_tokens": 100_000}


def test_a_drain_finishes_what_runs_and_begins_nothing(tmp_path: Path) -> None:
    """On kept connections and on new ones alike; the server still answers who asks how it is."""
    with serving(tmp_path, "--port", "0", FAKE_STEP_S="0.05") as process:
        url = read_until(process, r"(http://[\d.:]+)/v1").group(1)
        with (
            httpx.Client(base_url=url, timeout=DEADLINE_S) as kept,
            kept.stream("POST", "/v1/completions", json=STREAM) as response,
        ):
            lines = response.iter_lines()
            next(lines)
            assert kept.get("/ready").status_code == 200
            process.send_signal(signal.SIGTERM)
            eventually(lambda: kept.get("/ready").status_code == 503)
            for ask in (kept, httpx):
                at = url if ask is httpx else ""
                error = error_of(ask.post(f"{at}/v1/completions", json={"prompt": "x"}), 503)
                assert error["code"] == "draining"
                ready = ask.get(f"{at}/ready")
                assert error_of(ready, 503)["code"] == "draining"
                assert int(ready.headers["retry-after"]) > 0
                assert ask.get(f"{at}/health").status_code == 200
                assert ask.get(f"{at}/v1/models").status_code == 200
            *_, finish, _, done, _ = lines
        assert '"finish_reason":"length"' in finish
        assert done == "data: [DONE]"
        assert process.stdout is not None
        assert "Traceback" not in process.stdout.read()
        assert process.wait(DEADLINE_S) == 0


def test_a_second_signal_ends_the_patience(tmp_path: Path) -> None:
    """Its streams end with an error, long before the time is up, and the exit is clean."""
    arguments = ("--port", "0", "--shutdown-timeout", "1000")
    with serving(tmp_path, *arguments, FAKE_STEP_S="0.05") as process:
        url = read_until(process, r"(http://[\d.:]+)/v1").group(1)
        with httpx.stream("POST", f"{url}/v1/completions", json=ENDLESS) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGINT)
            eventually(lambda: httpx.get(f"{url}/ready").status_code == 503)
            begin = time.monotonic()
            process.send_signal(signal.SIGINT)
            *_, error, _, done, _ = lines
        assert "engine_stopped" in error
        assert done == "data: [DONE]"
        assert process.wait(DEADLINE_S) == 0
        assert time.monotonic() - begin < DEADLINE_S
