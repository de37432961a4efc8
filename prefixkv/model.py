"""A decoder of transformers whose attention the engine computes."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from prefixkv import attention_interface, gguf_model, model_probe, weights
from prefixkv.attention_interface import AttentionStep
from prefixkv.errors import ModelError
from prefixkv.packed_linear import pack_linears
from prefixkv.tokenizer import Tokenizer

_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# what a config says about its file rather than about the function it describes
_VOLATILE = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"}
_SAMPLING_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
# rotary embeddings that look at the longest sequence in the batch beyond the original context
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the engine has to know of a model; all of it is fixed at load.

    Args:
        windows: one per layer: how many of the newest positions a token sees, its own included;
            None means all.
        max_context: prompt and output tokens of one sequence, at most.
        config_digest: SHA-256 of the config without what changes no result.
        weights_fingerprint: 16 bytes over the weights.
        sampling_defaults: what the model's makers set of temperature, top_k, top_p, min_p and
            repetition_penalty.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    vocab_size: int
    max_context: int
    dtype: torch.dtype
    config_digest: bytes
    weights_fingerprint: bytes
    eos_token_ids: frozenset[int]
    sampling_defaults: Mapping[str, float]


class LanguageModel:
    """Computes logits of packed tokens; keys and values live with the `AttentionStep`.

    Attributes:
        facts: everything fixed about the model.
        tokenizer: None if the model was wrapped without one.
        hf: the model of transformers. Its attention is ours for good: calling it directly fails.
    """

    def __init__(
        self,
        hf_model: PreTrainedModel,
        tokenizer: Tokenizer | None,
        weights_fingerprint: bytes,
    ) -> None:
        shape = model_probe.probe(hf_model)
        hf_model.set_attn_implementation(attention_interface.NAME)
        self.hf = hf_model
        self.tokenizer = tokenizer
        config = hf_model.config.get_text_config(decoder=True)
        self.facts = ModelFacts(
            **shape._asdict(),
            num_layers=len(shape.windows),
            vocab_size=config.vocab_size,
            max_context=_max_context(config),
            dtype=hf_model.dtype,
            config_digest=_config_digest(hf_model.config),
            weights_fingerprint=weights_fingerprint,
            eos_token_ids=_eos_token_ids(hf_model, tokenizer),
            sampling_defaults=_sampling_defaults(hf_model),
        )

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return self.hf.device

    @classmethod
    def load(
        cls,
        spec: str,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "cpu",
        progress: bool = False,
    ) -> "LanguageModel":
        """Load a model by name, folder, GGUF file or hub id.

        On a CPU the weights of its linear layers are packed for speed: to replace them, load again.

        Args:
            spec: see `prefixkv.weights.resolve`.
            dtype: of weights and KV; "auto" takes that of the files (float32 for GGUF).
            device: where the weights go.
            progress: show downloads on the terminal.

        Raises:
            WeightsError: its files are missing, cut short or not the pinned ones.
            ModelError: it cannot be loaded, or not be served right.
        """
        wanted = _dtype(dtype)
        files = weights.resolve(spec, progress=progress)
        if files.is_gguf:
            hf_model = gguf_model.load_model(files.path, wanted or torch.float32)
            tokenizer = Tokenizer(gguf_model.load_tokenizer(files.path))
        else:
            hf_model = _load_folder(files, wanted)
            tokenizer = Tokenizer.from_folder(files.path)
        hf_model = hf_model.to(device).eval()  # type: ignore[arg-type] # its stub knows no device
        pack_linears(hf_model)
        return cls(hf_model, tokenizer, weights.fingerprint(files))

    @classmethod
    def from_transformers(
        cls, hf_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> "LanguageModel":
        """Wrap a model that is already built; switches it to evaluation and to our attention.

        The switch is in its config object, so it also hits other models built from the same one.

        Raises:
            ModelError: it cannot be served right.
        """
        hf_model.train(False)
        fingerprint = weights.fingerprint_parameters(hf_model.state_dict())
        return cls(hf_model, Tokenizer(tokenizer) if tokenizer else None, fingerprint)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionStep,
        logits_rows: torch.Tensor,
    ) -> torch.Tensor:
        """Run one packed batch through all layers.

        Args:
            token_ids: [num_tokens] int64, the tokens of all sequences one after another; like all
                else on the model's device.
            positions: [num_tokens] int64, each token's index in its own sequence.
            attention: called once per layer, in order.
            logits_rows: [num_rows] int64, the tokens whose logits are wanted; only these go
                through the LM head.

        Returns: [num_rows, vocab_size], float64 for a float64 model and float32 otherwise.
        """
        output = self.hf(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=logits_rows,
            kv_ctx=attention,
        )
        logits: torch.Tensor = output.logits[0]
        return logits if logits.dtype == torch.float64 else logits.float()


def _load_folder(files: weights.ModelFiles, dtype: torch.dtype | None) -> PreTrainedModel:
    try:
        with gguf_model.quietly():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                files.path,
                dtype=dtype or "auto",
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
            )
    except Exception as error:  # transformers raises many kinds for what it cannot load
        raise ModelError(f"{files.path}: transformers cannot load it: {error}") from None
    model: PreTrainedModel
    model, report = loaded
    weights.check_nothing_missing(files.path, report)
    return model


def _dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype != "auto" and dtype not in _DTYPES:
        raise ModelError(f"dtype is {dtype!r}; it must be auto or one of {', '.join(_DTYPES)}")
    return _DTYPES.get(dtype)


def _max_context(config: Any) -> int:
    """The longest sequence whose KV depends on nothing but its own tokens."""
    longest: int = config.max_position_embeddings
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        if parameters.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
            original = parameters.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            longest = min(longest, original or longest)
    return longest


def _config_digest(config: Any) -> bytes:
    content = json.loads(config.to_json_string(use_diff=False))
    return hashlib.sha256(json.dumps(_stable(content), sort_keys=True).encode()).digest()


def _stable(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _stable(v) for k, v in value.items() if k not in _VOLATILE}
    return value


def _eos_token_ids(hf_model: Any, tokenizer: Tokenizer | None) -> frozenset[int]:
    generation = getattr(hf_model, "generation_config", None)
    text_config = hf_model.config.get_text_config(decoder=True)
    sources = [getattr(source, "eos_token_id", None) for source in (generation, text_config)]
    for found in (*sources, tokenizer.eos_token_id if tokenizer else None):
        if found is not None:
            return frozenset([found] if isinstance(found, int) else found)
    return frozenset()


def _sampling_defaults(hf_model: Any) -> dict[str, float]:
    generation = getattr(hf_model, "generation_config", None)
    if generation is None or generation.do_sample is False:
        return {}
    values = {name: getattr(generation, name, None) for name in _SAMPLING_DEFAULTS}
    return {name: value for name, value in values.items() if value is not None}
