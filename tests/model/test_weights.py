"""Broken model files are named with what was expected and what was found, before anything loads."""

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from prefixkv import weights
from prefixkv.errors import ModelError, WeightsError
from prefixkv.model import LanguageModel


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
    hf.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def write_gguf(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_tensor("token_embd.weight", np.ones((40, 16), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def cut(path: Path, num_bytes: int) -> int:
    content = path.read_bytes()
    path.write_bytes(content[:num_bytes])
    return len(content)


def test_a_whole_folder_resolves_to_its_files(folder: Path) -> None:
    files = weights.resolve(str(folder))

    assert files == weights.ModelFiles(folder)
    assert files.weight_files() == [folder / "model.safetensors"]


def test_a_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=r"has no weights: neither model\.safetensors nor"):
        weights.resolve(str(folder))


def test_a_folder_without_a_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(WeightsError, match=r"has no config\.json"):
        weights.resolve(str(folder))


def test_a_lora_adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="LoRA adapter, which is not supported yet"):
        weights.resolve(str(folder))


@pytest.mark.parametrize("num_bytes", [-1, 2500])
def test_truncated_safetensors_name_both_sizes(folder: Path, num_bytes: int) -> None:
    path = folder / "model.safetensors"
    expected = cut(path, num_bytes)
    found = path.stat().st_size
    with pytest.raises(WeightsError, match=f"has {found} bytes, its header says {expected}"):
        weights.resolve(str(folder))


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 100])
def test_a_safetensors_file_without_a_header(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(WeightsError, match=f"it has {len(content)} bytes"):
        weights.resolve(str(folder))


def test_a_safetensors_header_that_is_no_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((9).to_bytes(8, "little") + b"[1, 2, 3]")
    with pytest.raises(WeightsError, match="its header is broken"):
        weights.resolve(str(folder))


def test_a_missing_shard(folder: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightsError, match="lists 2 weight files, 1 of them missing: model-2"):
        weights.resolve(str(folder))


def test_a_broken_shard_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{")
    with pytest.raises(WeightsError, match="is not JSON"):
        weights.resolve(str(folder))


def test_a_truncated_gguf_file_names_both_sizes(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    assert weights.resolve(str(path)).weight_files() == [path]

    # the writer pads after the last tensor, which nobody needs
    expected = path.stat().st_size
    cut(path, expected - 100)
    with pytest.raises(WeightsError, match=rf"has {expected - 100} bytes, its tensors need \d+"):
        weights.resolve(str(path))


@pytest.mark.parametrize("num_bytes", [0, 3, 20, 60])
def test_a_gguf_file_that_ends_in_its_header(tmp_path: Path, num_bytes: int) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    cut(path, num_bytes)
    with pytest.raises(WeightsError, match=rf"\({num_bytes} bytes\) is cut short or no GGUF"):
        weights.resolve(str(path))


@pytest.mark.parametrize("spec", ["no-such-model", "./no/such", "/no/such", "x.gguf", "a/b.gguf"])
def test_nothing_of_that_name(spec: str) -> None:
    with pytest.raises(ModelError, match="no such folder or file, and not a hub id"):
        weights.resolve(spec)


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"but not a \.gguf one"):
        weights.resolve(str(tmp_path / "x.bin"))


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="nobody/nothing: not on this machine, and the hub gave"):
        weights.resolve("nobody/nothing")


def test_the_fingerprint_covers_names_contents_and_config(saved: Path, folder: Path) -> None:
    original = weights.fingerprint(weights.ModelFiles(saved))
    assert weights.fingerprint(weights.ModelFiles(folder)) == original
    assert len(original) == 16

    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    flipped = weights.fingerprint(weights.ModelFiles(folder))
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    reconfigured = weights.fingerprint(weights.ModelFiles(folder))

    assert len({original, flipped, reconfigured}) == 3


def test_a_model_without_a_tokenizer_is_a_model_error(folder: Path) -> None:
    with pytest.raises(ModelError, match="no usable tokenizer"):
        LanguageModel.load(str(folder))


def test_weights_of_another_shape_are_a_model_error(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 32}))
    with pytest.raises(ModelError, match="transformers cannot load it"):
        LanguageModel.load(str(folder))


def test_a_tensor_that_the_files_lack_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(WeightsError, match=r"lack 1 .*: model\.layers\.1\.mlp\.up_proj\.weight"):
        LanguageModel.load(str(folder))


def test_an_unknown_dtype_is_a_model_error(folder: Path) -> None:
    with pytest.raises(ModelError, match="dtype is 'int4'"):
        LanguageModel.load(str(folder), dtype="int4")
