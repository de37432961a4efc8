"""https and a proxy's prefix: options that go to the HTTP server as they are."""

import shutil
import signal
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest

from prefixkv.api.options.server_options import ServerOptions
from prefixkv.api.serving.server import run
from prefixkv.config import EngineConfig
from prefixkv.errors import ConfigError
from tests.api.live_server import DEADLINE_S
from tests.api.server_process import read_until, serving


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_https_below_a_prefix(tmp_path: Path) -> None:
    """The address says both; keys guard and monitoring is open below the prefix as without one."""
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
        f"-keyout {key} -out {certificate} -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    )
    subprocess.run(command.split(), check=True, capture_output=True)
    trusting = ssl.create_default_context(cafile=certificate)
    arguments = ("--port", "0", "--root-path", "/llm", "--api-key", "k")
    files = ("--ssl-keyfile", key, "--ssl-certfile", certificate)
    with serving(tmp_path, *arguments, *files) as process:
        url = read_until(process, r"serves m at (https://[\d.:]+)/llm/v1").group(1)
        read_until(process, r'-H "Authorization: Bearer \$API_KEY"')
        with httpx.Client(base_url=url, verify=trusting, timeout=DEADLINE_S) as client:
            # a proxy takes the prefix off
            assert client.get("/health").status_code == 200
            assert client.get("/v1/models").status_code == 401
            headers = {"Authorization": "Bearer k"}
            body = {"prompt": "x", "max_tokens": 1}
            assert client.post("/v1/completions", json=body, headers=headers).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (ServerOptions(ssl_keyfile=Path("k.pem")), "k.pem needs --ssl-certfile"),
        (ServerOptions(ssl_certfile=Path("c.pem")), "No such file or directory"),
    ],
)
def test_wrong_files_are_told_before_the_model_is_loaded(
    options: ServerOptions, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a port in use is."""
    monkeypatch.setattr("prefixkv.api.serving.server.configure_logs", lambda *arguments: None)
    with pytest.raises(ConfigError, match=complaint):
        run(EngineConfig(), options)
