"""Reads GGUF files through transformers, and mends what its conversion loses."""

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations.gguf.reader import GgufHeader, read_gguf_metadata

from prefixkv.errors import ModelError, WeightsError


def check_complete(path: Path) -> None:
    """Raise WeightsError unless the file is GGUF and as long as its tensor table says."""
    found = path.stat().st_size
    try:
        header = GgufHeader.from_file(str(path))
    except Exception as error:  # a cut header fails wherever the reader stood
        raise WeightsError(
            f"{path} ({found} bytes) is cut short or no GGUF file: {error}"
        ) from None
    expected = header.data_start + max(t.offset + t.nbytes for t in header.tensors)
    if found < expected:
        raise WeightsError(f"{path} has {found} bytes, its tensors need {expected}")


def load_model(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Return the dequantised model. Requires: the file is complete."""
    try:
        with quietly():
            model = AutoModelForCausalLM.from_pretrained(
                path.parent, gguf_file=path.name, dtype=dtype
            )
    except Exception as error:  # transformers raises many kinds for what it cannot convert
        raise ModelError(f"{path}: transformers cannot convert it: {error}") from None
    _forget_quantization(model)
    _round_epsilon(model.config)
    return model


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer that the file describes. Requires: the file is complete."""
    try:
        with quietly():
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:
        raise ModelError(f"{path}: no usable tokenizer: {error}") from None
    metadata, _ = read_gguf_metadata(str(path))
    if metadata.get("tokenizer.ggml.pre") == "smollm":
        # lost in the conversion: digits are split off first, so blanks before them stay together
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    return tokenizer


def _forget_quantization(model: Any) -> None:
    """Make a dequantised model an ordinary one; transformers refuses to save it otherwise."""
    for name in ("quantization_config", "_model_name_or_path"):
        if hasattr(model.config, name):
            delattr(model.config, name)
    model.hf_quantizer = None
    model.is_quantized = False


def _round_epsilon(config: Any) -> None:
    """GGUF holds float32; write the decimal that it stands for, as the original config does."""
    epsilon = getattr(config, "rms_norm_eps", None)
    if epsilon is not None:
        config.rms_norm_eps = float(str(np.float32(epsilon)))


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Swallow standard error: loading draws progress bars that no argument turns off."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield
