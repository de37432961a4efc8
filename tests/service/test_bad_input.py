"""Nothing that a client sends costs more than its own answer; nothing a user types a traceback."""

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from prefixkv.api.cli import main
from tests.service.conftest import PREFIXKV

SERVER = "tiny_server"
COMPLETIONS = "/v1/completions"
CHATS = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]

Done = subprocess.CompletedProcess[str]
RunCommand = Callable[..., Done]


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "said"),
    [
        (COMPLETIONS, {"prompt": ""}, 400, "prompt", "empty"),
        (COMPLETIONS, {"prompt": []}, 400, "prompt", "empty"),
        (COMPLETIONS, {"prompt": [[]]}, 400, "prompt", "empty"),
        (COMPLETIONS, {"prompt": "a" * 600}, 400, "prompt", "600 prompt tokens"),
        (COMPLETIONS, {"prompt": "a" * 255, "max_tokens": 9}, 400, "prompt", "context of 257"),
        (COMPLETIONS, {"prompt": [5, 259]}, 400, "prompt", "259"),
        (COMPLETIONS, {"prompt": [5, -1]}, 400, "prompt", "-1"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, 400, "max_tokens", "0"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": -3}, 400, "max_tokens", "-3"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": "many"}, 400, "max_tokens", "many"),
        (COMPLETIONS, {"prompt": "a", "temperature": -1}, 400, "temperature", "-1"),
        (COMPLETIONS, '{"prompt": "a", "temperature": NaN}', 400, None, ""),
        (COMPLETIONS, {"prompt": "a", "top_p": 0}, 400, "top_p", "0"),
        (COMPLETIONS, {"prompt": "a", "top_p": 1.5}, 400, "top_p", "1.5"),
        (COMPLETIONS, {"prompt": "a", "model": "gpt-9"}, 404, None, "gpt-9"),
        (COMPLETIONS, {"prompt": "a", "n": 129}, 400, "n", "128"),
        (COMPLETIONS, {"prompt": "a", "n": 2, "best_of": 1}, 400, "best_of", "n, which is 2"),
        (COMPLETIONS, '{"prompt": "a', 400, None, ""),
        (COMPLETIONS, "[1, 2]", 400, None, ""),
        (CHATS, {"messages": []}, 400, "messages", "empty"),
        (CHATS, {"messages": "hi"}, 400, "messages", ""),
        (CHATS, {"messages": [{"role": "wizard", "content": "hi"}]}, 400, "messages", "wizard"),
        (CHATS, {"messages": MESSAGES, "tools": [{"type": "function"}]}, 400, "tools", "tools"),
        (CHATS, {"messages": [{"role": "user", "content": "a" * 600}]}, 400, "messages", "tokens"),
    ],
)
def test_a_bad_request_gets_one_clear_error(
    client: httpx.Client, path: str, body: Any, status: int, param: str | None, said: str
) -> None:
    """All four keys, the field's name, the numbers; and the next request is served as ever."""
    content = body if isinstance(body, str) else json.dumps(body)
    response = client.post(path, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param or param is None
    assert said in error["message"]
    assert len(response.content) < 2000

    good = client.post(COMPLETIONS, json={"prompt": "abc", "max_tokens": 3, "temperature": 0})
    assert good.status_code == 200
    assert good.json()["usage"]["completion_tokens"] <= 3


def test_a_request_as_large_as_the_pool_is_served_after_all_of_that(client: httpx.Client) -> None:
    """Nothing was leaked: 64 blocks of 4 tokens hold a prompt of 256, twice."""
    prompt = [(7 * i) % 250 + 3 for i in range(256)]
    texts = set()
    for cached in (0, 252):
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
        answer = client.post(COMPLETIONS, json=body).json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
        texts.add(answer["choices"][0]["text"])
    assert len(texts) == 1


# -- the command line ----------------------------------------------------------------------------


def run_process(*arguments: str, **env: str) -> Done:
    return subprocess.run(
        [PREFIXKV, *arguments],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def run_cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> RunCommand:
    """The command in this process, which has loaded already what takes it seconds."""

    def run(*arguments: str, **env: str) -> Done:
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        status: Any = 0
        try:
            main(arguments)
        except SystemExit as end:
            status = end.code or 0
        return subprocess.CompletedProcess(arguments, status, *capsys.readouterr())

    return run


def assert_refused(result: Done, *said: str) -> None:
    """An exit code that is not 0, one clear line, no traceback."""
    assert result.returncode != 0
    assert "Traceback" not in result.stderr + result.stdout
    for words in said:
        assert words in result.stderr


def test_a_port_in_use_is_told_before_anything_is_loaded(tiny_folder: Path) -> None:
    """With host and port."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run_process("serve", str(tiny_folder), "--port", str(port))
    assert_refused(result, f"127.0.0.1:{port}")


def test_more_memory_than_there_is_is_refused(run_cli: RunCommand, tiny_folder: Path) -> None:
    """With what was asked and what is there."""
    result = run_cli("generate", "hi", "--model", str(tiny_folder), "--num-blocks", "999999999999")
    assert_refused(result, "GiB", "are available")


def test_a_folder_without_weights_is_refused(
    run_cli: RunCommand, tiny_folder: Path, tmp_path: Path
) -> None:
    """It says what is missing where."""
    folder = tmp_path / "empty"
    shutil.copytree(tiny_folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    assert_refused(run_cli("generate", "hi", "--model", str(folder)), str(folder))


def test_truncated_files_are_refused(
    run_cli: RunCommand, tiny_folder: Path, tmp_path: Path
) -> None:
    """A GGUF and safetensors cut short: the message has the bytes."""
    gguf = tmp_path / "short.gguf"
    gguf.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(50))
    assert_refused(run_cli("generate", "hi", "--model", str(gguf)), str(gguf))
    folder = tmp_path / "cut"
    shutil.copytree(tiny_folder, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert_refused(run_cli("generate", "hi", "--model", str(folder)), "model.safetensors")


def test_options_out_of_range_are_refused(run_cli: RunCommand, tiny_folder: Path) -> None:
    """From the command line and from the environment."""
    model = ("--model", str(tiny_folder))
    assert_refused(run_cli("generate", "hi", *model, "--block-size", "12"), "12")
    assert_refused(run_cli("generate", "hi", *model, "--max-tokens", "0"), "--max-tokens")
    assert_refused(run_cli("generate", "hi", *model, PREFIXKV_BLOCK_SIZE="12"), "12")


def test_a_model_that_is_nowhere_is_refused_by_the_installed_command() -> None:
    """In a process of its own, to its very end."""
    result = run_process("generate", "hi", "--model", "no/such-model", HF_HUB_OFFLINE="1")
    assert_refused(result, "no/such-model")


def test_generate_and_info_work(run_cli: RunCommand, tiny_folder: Path) -> None:
    """The other commands answer as well."""
    result = run_cli(
        "generate", "hi", "--model", str(tiny_folder), "--max-tokens", "3", "--temperature", "0",
        "--batch-invariant-attention",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    info = run_cli("info", str(tiny_folder), "--num-blocks", "64", "--block-size", "4")
    assert info.returncode == 0, info.stderr
    assert "64 of 4 tokens" in info.stdout
