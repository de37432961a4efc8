"""Finds the files of a model, and says what is wrong with them before anything is loaded."""

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from xxhash import xxh3_128

from prefixkv import default_model, gguf_model
from prefixkv.errors import ModelError, WeightsError

_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "tokenizer*"]
_INDEX = "model.safetensors.index.json"
_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A checked model on disk: a folder as transformers writes it, or one GGUF file."""

    path: Path

    @property
    def is_gguf(self) -> bool:
        """Whether `path` is a GGUF file rather than a folder."""
        return self.path.suffix == ".gguf"

    def weight_files(self) -> list[Path]:
        """Return the files that hold the weights, by name."""
        return [self.path] if self.is_gguf else _shards(self.path)


def resolve(spec: str, *, progress: bool = False) -> ModelFiles:
    """Find a model's files, downloading them if they are not on this machine.

    Args:
        spec: `smollm2-135m` (the default model), a folder, a `.gguf` file or a hub id `owner/name`.
        progress: show downloads on the terminal.

    Raises:
        WeightsError: files are missing, cut short or not what was pinned.
        ModelError: nothing has that name, or it is something that cannot be served.
    """
    if spec == default_model.NAME:
        return _checked_folder(default_model.fetch(progress=progress))
    path = Path(spec).expanduser()
    if path.is_dir():
        return _checked_folder(path)
    if path.is_file():
        return _checked_file(path)
    if _looks_like_hub_id(spec):
        return _checked_folder(_download(spec))
    raise ModelError(
        f"{spec}: no such folder or file, and not a hub id (owner/name); "
        f"the default model is {default_model.NAME}"
    )


def check_nothing_missing(path: Path, loading_report: Mapping[str, Any]) -> None:
    """Raise WeightsError for tensors that transformers did not find and made up at random."""
    missing = sorted(loading_report["missing_keys"])
    if missing:
        raise WeightsError(
            f"the weight files of {path} lack {len(missing)} of the model's tensors: "
            f"{', '.join(missing[:3])}"
        )


def fingerprint(files: ModelFiles) -> bytes:
    """Return 16 bytes over the names, sizes and contents of the weight files and the config."""
    digest = xxh3_128()
    config = [] if files.is_gguf else [files.path / "config.json"]
    for path in files.weight_files() + config:
        # a GGUF file may have any name; what it is called says nothing about its weights
        name = "model.gguf" if files.is_gguf else path.name
        _add_header(digest.update, name, path.stat().st_size)
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.digest()


def fingerprint_parameters(parameters: dict[str, torch.Tensor]) -> bytes:
    """Return 16 bytes over names, types, shapes and contents of weights in memory."""
    digest = xxh3_128()
    for name, tensor in sorted(parameters.items()):
        _add_header(digest.update, f"{name} {tensor.dtype} {tuple(tensor.shape)}", tensor.nbytes)
        values = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(values.view(torch.uint8).numpy().data)
    return digest.digest()


def _add_header(update: Callable[[bytes], object], name: str, num_bytes: int) -> None:
    # lengths first, so that no two lists of files read alike
    encoded = name.encode()
    update(struct.pack("<QQ", len(encoded), num_bytes) + encoded)


def _checked_folder(folder: Path) -> ModelFiles:
    if (folder / "adapter_config.json").exists():
        raise ModelError(f"{folder} holds a LoRA adapter, which is not supported yet")
    if not (folder / "config.json").is_file():
        raise WeightsError(f"{folder} has no config.json, so it is not a model folder")
    for path in _shards(folder):
        _check_safetensors(path)
    return ModelFiles(folder)


def _checked_file(path: Path) -> ModelFiles:
    if path.suffix != ".gguf":
        raise ModelError(f"{path} is a file, but not a .gguf one; give the folder of the model")
    gguf_model.check_complete(path)
    return ModelFiles(path)


def _shards(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if not index.is_file():
        single = folder / "model.safetensors"
        if not single.is_file():
            raise WeightsError(
                f"{folder} has no weights: neither model.safetensors nor {_INDEX}; "
                "other formats must be converted to safetensors first"
            )
        return [single]
    names = sorted(set(_read_json(index).get("weight_map", {}).values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing or not names:
        raise WeightsError(
            f"{index} lists {len(names)} weight files, {len(missing)} of them missing: "
            f"{', '.join(missing[:3])}"
        )
    return [folder / name for name in names]


def _check_safetensors(path: Path) -> None:
    found = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        header_bytes = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or 8 + header_bytes > found:
            raise WeightsError(
                f"{path} is cut short or no safetensors file: it has {found} bytes, "
                f"its header alone takes {8 + header_bytes}"
            )
        try:
            header = json.loads(file.read(header_bytes))
            ends = [entry["data_offsets"][1] for key, entry in header.items() if key[0] != "_"]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            raise WeightsError(f"{path} is no safetensors file: its header is broken") from None
    expected = 8 + header_bytes + max(ends, default=0)
    if found != expected:
        raise WeightsError(f"{path} has {found} bytes, its header says {expected}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise WeightsError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise WeightsError(f"{path} holds {type(content).__name__}, not an object")
    return content


def _looks_like_hub_id(spec: str) -> bool:
    owner, _, name = spec.partition("/")
    allowed = (set(part) <= _HUB_CHARS and part[0] != "." for part in (owner, name) if part)
    return bool(owner and name) and all(allowed) and not spec.endswith(".gguf")


def _download(spec: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(spec, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(f"{spec}: not on this machine, and the hub gave: {reason}") from None


_HUB_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")
