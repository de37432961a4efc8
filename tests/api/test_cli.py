"""The `prefixkv` command: options, environment, exit codes, and what it prints."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from prefixkv.api import model_summary
from prefixkv.api.model_summary import ModelSummary
from prefixkv.api.options.server_options import ServerOptions
from prefixkv.api.serving import server
from prefixkv.config import DEFAULT_MODEL, EngineConfig
from prefixkv.errors import ModelError
from tests.api.command_line import run
from tests.api.fake_engine import ALPHABET, FakeEngine


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """Return the engine that `generate` gets."""
    engine = FakeEngine()
    monkeypatch.setattr(server, "build_engine", lambda config: engine)
    return engine


def test_defaults(served: list[Any]) -> None:
    """Without options: the default model on localhost."""
    assert run("serve") == 0
    assert served == [(EngineConfig(), ServerOptions())]


def test_every_option_arrives(served: list[Any]) -> None:
    """Names are those that vLLM's users know."""
    line = (
        "serve org/model --served-model-name a --served-model-name b --host 0.0.0.0 --port 9 "
        "--dtype float32 --max-model-len 100 --block-size 32 "
        "--kv-cache-memory-bytes 2G --max-num-seqs 3 --max-num-batched-tokens 50 --max-queue 4 "
        "--no-enable-prefix-caching --attention-backend reference --seed 5 "
        "--uvicorn-log-level error --log-level debug --shutdown-timeout 1 "
        "--api-key k1 --api-key k,2 --api-key-file keys.toml --admin-api-key root "
        "--max-requests-per-key 7 --allowed-origins https://a --allowed-origins https://b "
        "--max-body-bytes 1M --log-format json --disable-access-log-for-endpoints /x "
        "--root-path /llm --ssl-keyfile k.pem --ssl-certfile c.pem"
    )
    assert run(*line.split()) == 0

    config, options = served[0]
    assert config == EngineConfig(
        model="org/model",
        dtype="float32",
        max_model_len=100,
        block_size=32,
        kv_cache_memory_bytes=2 * 2**30,
        max_num_seqs=3,
        max_num_batched_tokens=50,
        max_num_waiting=4,
        enable_prefix_caching=False,
        attention_backend="reference",
        seed=5,
    )
    assert options == ServerOptions(
        served_model_name=["a", "b"],
        host="0.0.0.0",
        port=9,
        uvicorn_log_level="error",
        log_level="debug",
        shutdown_timeout=1,
        api_key=["k1", "k,2"],
        api_key_file=Path("keys.toml"),
        admin_api_key="root",
        max_requests_per_key=7,
        allowed_origins=["https://a", "https://b"],
        max_body_bytes=2**20,
        log_format="json",
        disable_access_log_for_endpoints="/x",
        root_path="/llm",
        ssl_keyfile=Path("k.pem"),
        ssl_certfile=Path("c.pem"),
    )


def test_the_environment_fills_in_and_the_line_wins(
    served: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PREFIXKV_* stands for an option unless the option is given."""
    for name, value in {
        "MODEL": "from-env",
        "PORT": "1234",
        "KV_CACHE_MEMORY_BYTES": "512M",
        "ENABLE_PREFIX_CACHING": "0",
        "SERVED_MODEL_NAME": "a b",
        "API_KEY": "k1, k2,k3",
    }.items():
        monkeypatch.setenv(f"PREFIXKV_{name}", value)
    assert run("serve") == 0
    assert run("serve", "from-line", "--port", "4321") == 0

    by_env, by_line = served
    assert (by_env[0].model, by_env[1].port) == ("from-env", 1234)
    assert by_env[0].kv_cache_memory_bytes == 512 * 2**20
    assert by_env[0].enable_prefix_caching is False
    assert by_env[1].served_model_name == ["a", "b"]
    assert by_env[1].api_key == ["k1", "k2", "k3"]
    assert "k1" not in repr(by_env)
    assert (by_line[0].model, by_line[1].port) == ("from-line", 4321)


@pytest.mark.parametrize("option", ["--num-blocks", "--num-gpu-blocks-override"])
def test_blocks_have_two_names_and_exclude_memory(served: list[Any], option: str) -> None:
    """Ours and vLLM's; with an amount of memory beside it, nothing says which one counts."""
    assert run("serve", option, "7") == 0
    assert served[0][0].num_blocks == 7
    assert run("serve", option, "7", "--kv-cache-memory-bytes", "2G") == 1


@pytest.mark.parametrize(
    ("arguments", "model"),
    [
        ([], DEFAULT_MODEL),
        (["x"], "x"),
        (["--model", "x"], "x"),
        (["x", "--model", "x"], "x"),
    ],
)
def test_a_model_is_positional_or_an_option(
    served: list[Any], arguments: list[str], model: str
) -> None:
    """Both spellings mean the same."""
    assert run("serve", *arguments) == 0
    assert served[0][0].model == model


def test_threads_are_set_before_anything_counts_them(
    served: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenMP and numba read their environment once."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("NUMBA_NUM_THREADS", "1")
    assert run("serve", "--threads", "3") == 0
    assert os.environ["OMP_NUM_THREADS"] == os.environ["NUMBA_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    "line",
    [
        "serve x --model y",
        "serve --port 70000",
        "serve --kv-cache-memory-bytes 2X",
        "serve --kv-cache-memory-bytes 0",
        "serve --attention-backend fast",
        "serve --max-num-seqs 0",
        "serve --nonsense",
        "generate",
        "nonsense",
    ],
)
def test_usage_errors_exit_with_2(
    served: list[Any], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong line is explained on stderr."""
    assert run(*line.split()) == 2
    assert capsys.readouterr().err


def test_our_errors_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1 and no traceback, unless --debug stands anywhere or in the environment."""

    def fail(model: str, *, force: bool) -> Path:
        raise ModelError(f"{model} is not\nthere")

    monkeypatch.setattr(model_summary, "pull_model", fail)
    assert run("pull", "x") == 1
    assert capsys.readouterr().err == "prefixkv: x is not there\n"
    for arguments in (["--debug", "pull", "x"], ["pull", "x", "--debug"]):
        assert run(*arguments) == 1
        assert "Traceback" in capsys.readouterr().err
    monkeypatch.setenv("PREFIXKV_DEBUG", "1")
    assert run("pull", "x") == 1
    assert "Traceback" in capsys.readouterr().err


def test_pull_prints_where_the_model_lies(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The path alone is on stdout, for scripts."""
    calls: list[tuple[str, bool]] = []

    def pull(model: str, *, force: bool) -> Path:
        calls.append((model, force))
        return Path("/models/x")

    monkeypatch.setattr(model_summary, "pull_model", pull)
    assert run("pull", "--force") == 0
    assert calls == [(DEFAULT_MODEL, True)]
    assert capsys.readouterr().out == "/models/x\n"


def test_info_prints_what_the_cache_costs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Layers, heads, context, bytes a token, and the blocks that would be allocated."""
    summary = ModelSummary(
        model="x", architecture="LlamaForCausalLM", num_layers=30, num_heads=9, num_kv_heads=3,
        head_dim=64, vocab_size=49152, max_model_len=8192, dtype="float32",
        kv_bytes_per_token=46080, block_size=16, num_blocks=1000,
    )  # fmt: skip
    monkeypatch.setattr(model_summary, "summarize", lambda config: summary)
    assert run("info", "x") == 0

    out = capsys.readouterr().out
    for part in ("LlamaForCausalLM", "30", "9 (3 for K and V)", "8,192 tokens", "45 KiB",
                 "1,000 of 16 tokens", "16,000 tokens, 703.1 MiB"):  # fmt: skip
        assert part in out


def test_generate_prints_one_text_as_it_comes(
    fake: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    """A text is cut after 16 tokens, a chat is not; the engine is stopped at the end."""
    assert run("generate", "x") == 0
    assert capsys.readouterr().out == ALPHABET[:16] + "\n"
    assert run("generate", "--chat", "x") == 0
    assert capsys.readouterr().out == ALPHABET + "\n"
    assert fake.prompts == ["x", "<user>x\n<assistant>"]
    assert not fake.is_running


def test_generate_prints_several_texts_in_order(
    fake: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sampling options reach the engine."""
    line = "generate x y --max-tokens 3 --temperature 0 --stop c --seed 4"
    assert run(*line.split()) == 0
    assert capsys.readouterr().out == "ab\n\nab\n"
    params = fake.calls[0]["params"]
    assert (params.temperature, params.stop, params.seed) == (0, ("c",), 4)


@pytest.mark.parametrize("line", ["generate x --top-p 2", "generate x --top-p nan"])
def test_generate_refuses_wrong_options_in_one_line(
    fake: FakeEngine, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranges are checked where the API checks them."""
    assert run(*line.split()) == 1
    assert capsys.readouterr().err.startswith("prefixkv: top_p is ")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """The version of the distribution."""
    assert run("--version") == 0
    assert capsys.readouterr().out[0].isdigit()


def test_help_is_fast_because_it_imports_nothing_heavy() -> None:
    """Neither torch nor the web framework is loaded to print help."""
    code = (
        "import sys, prefixkv.api.cli as cli\n"
        "try: cli.main(['serve', '--help'])\n"
        "finally:\n"
        "    heavy = {'torch', 'transformers', 'fastapi', 'uvicorn', 'numba', 'numpy'}\n"
        "    print('heavy:', sorted(heavy & sys.modules.keys()))"
    )
    begin = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=20, check=True
    )

    assert "heavy: []" in result.stdout
    # far from the second that it may take, so that a busy machine does not matter
    assert time.monotonic() - begin < 10
