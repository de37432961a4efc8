"""`prefixkv serve --config`: options in a file, beneath the environment and the line."""

from pathlib import Path
from typing import Any

import pytest

from tests.api.command_line import run

YAML = """
model: org/from-file
port: 1
host: 10.0.0.1
max_num_seqs: 8          # either spelling
kv-cache-memory-bytes: 512M
enable-prefix-caching: false
shutdown-timeout: 1.5
served-model-name: [a, b]
api-key: sk-file
max-body-bytes: 1000
seed:
"""


def test_file_beneath_environment_beneath_line(
    served: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each value comes from the highest of the three that has it."""
    path = tmp_path / "serve.yaml"
    path.write_text(YAML)
    assert run("serve", "--config", str(path)) == 0
    monkeypatch.setenv("PREFIXKV_HOST", "10.0.0.2")
    monkeypatch.setenv("PREFIXKV_PORT", "2")
    monkeypatch.setenv("PREFIXKV_CONFIG", str(path))
    assert run("serve", "--port", "3", "--enable-prefix-caching", "org/line") == 0

    (engine, options), (over_engine, over) = served
    assert (engine.model, engine.max_num_seqs, engine.seed) == ("org/from-file", 8, None)
    assert (engine.kv_cache_memory_bytes, engine.enable_prefix_caching) == (512 * 2**20, False)
    assert (options.host, options.port, options.shutdown_timeout) == ("10.0.0.1", 1, 1.5)
    assert (options.served_model_name, options.api_key) == (["a", "b"], ["sk-file"])
    assert options.max_body_bytes == 1000
    assert (over_engine.model, over_engine.max_num_seqs) == ("org/line", 8)
    assert over_engine.enable_prefix_caching is True
    assert (over.host, over.port, over.api_key) == ("10.0.0.2", 3, ["sk-file"])


def test_every_option_may_stand_in_the_file_under_each_of_its_names(
    served: list[Any], tmp_path: Path
) -> None:
    """Also in TOML."""
    path = tmp_path / "serve.toml"
    path.write_text('num-gpu-blocks-override = 7\nmax-queue = 3\nlog-level = "debug"\n')
    assert run("serve", "--config", str(path)) == 0

    engine, options = served[0]
    assert (engine.num_blocks, engine.max_num_waiting, options.log_level) == (7, 3, "debug")


@pytest.mark.parametrize(
    ("name", "text", "code", "complaint"),
    [
        ("c.yaml", "max-num-seq: 8", 1, "'max-num-seq'; near it are max-num-seqs"),
        ("c.yaml", "no-enable-prefix-caching: true", 1, "near it are enable-prefix-caching"),
        ("c.yaml", "config: other.yaml", 1, "no option is called 'config'"),
        ("c.yaml", "num-blocks: 1\nnum_gpu_blocks_override: 2", 1, "is already set"),
        ("c.yaml", "port: [1, 2]", 1, "'port' takes one value, not a list"),
        ("c.yaml", "port: {a: 1}", 1, "'port' must be a text, a number"),
        ("c.yaml", "port: many", 2, "--port"),
        ("c.yaml", "port: 70000", 2, "--port"),
        ("c.yaml", "- port", 1, "not a list"),
        ("c.toml", "host = 'x'\nport = =", 1, "line 2"),
        ("c.ini", "port = 1", 1, "must end with one of .yaml, .yml, .toml, .json"),
    ],
)
def test_what_the_file_may_not_say_is_told(
    served: list[Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    text: str,
    code: int,
    complaint: str,
) -> None:
    """Nothing is served under options that were not understood."""
    path = tmp_path / name
    path.write_text(text)
    assert run("serve", "--config", str(path)) == code
    assert complaint in capsys.readouterr().err
    assert served == []


def test_a_file_that_is_not_there_is_told(
    served: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line."""
    assert run("serve", "--config", "nothing.yaml") == 1
    assert capsys.readouterr().err == "prefixkv: nothing.yaml: No such file or directory\n"


def test_help_does_not_show_keys_of_the_file(
    served: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Defaults that come from a file are defaults of the help, too."""
    path = tmp_path / "serve.yaml"
    path.write_text("api-key: SECRET-1\nadmin-api-key: SECRET-2\nport: 4711\n")
    assert run("serve", "--config", str(path), "--help") == 0
    told = capsys.readouterr().out

    assert "4711" in told
    assert "SECRET" not in told
