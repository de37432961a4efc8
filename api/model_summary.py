"""What `prefixkv info` and `prefixkv pull` do with a model: describe it, fetch it."""

from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from prefixkv.api.options.byte_size import format_bytes
from prefixkv.config import DEFAULT_MODEL, EngineConfig
from prefixkv.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSummary:
    """The shape of a model and what its KV cache costs."""

    model: str
    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    dtype: str
    kv_bytes_per_token: int
    block_size: int
    num_blocks: int

    def table(self) -> Table:
        """Return the facts as a table to print."""
        table = Table(show_header=False)
        table.add_column(style="bold")
        table.add_column()
        num_tokens = self.num_blocks * self.block_size
        rows = {
            "model": self.model,
            "architecture": self.architecture,
            "layers": f"{self.num_layers:,}",
            "heads": f"{self.num_heads:,} ({self.num_kv_heads:,} for K and V)",
            "head dim": f"{self.head_dim:,}",
            "vocabulary": f"{self.vocab_size:,}",
            "context": f"{self.max_model_len:,} tokens",
            "dtype": self.dtype,
            "KV cache per token": format_bytes(self.kv_bytes_per_token),
            "blocks": f"{self.num_blocks:,} of {self.block_size} tokens",
            "KV cache": f"{num_tokens:,} tokens, "
            f"{format_bytes(num_tokens * self.kv_bytes_per_token)}",
        }
        for name, value in rows.items():
            table.add_row(name, value)
        return table


def summarize(config: EngineConfig) -> ModelSummary:
    """Read what there is to know of the model that `config` names, and size its pool.

    Raises:
        ModelError: it is not there or cannot be served.
    """
    from prefixkv.device import choose_device
    from prefixkv.model import LanguageModel
    from prefixkv.sizing import size_pool

    device = choose_device(config.device)
    model = LanguageModel.load(config.model, dtype=config.dtype, device=device, progress=True)
    facts = model.facts
    shape, num_blocks, _ = size_pool(model, config, None)
    return ModelSummary(
        model=config.model,
        architecture=type(model.hf).__name__,
        num_layers=facts.num_layers,
        num_heads=facts.num_heads,
        num_kv_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
        vocab_size=facts.vocab_size,
        max_model_len=facts.max_context,
        dtype=str(facts.dtype).removeprefix("torch."),
        kv_bytes_per_token=shape.block_bytes // shape.block_size,
        block_size=config.block_size,
        num_blocks=num_blocks - 1,
    )


def pull_model(model: str, *, force: bool) -> Path:
    """Fetch `model` into the cache folder, again if `force`, and return where it lies.

    Raises:
        ConfigError: `force` for another model than the default one, which is not ours to replace.
        ModelError: it cannot be fetched, or is not what was pinned.
    """
    from prefixkv import default_model, weights

    if not force:
        return weights.resolve(model, progress=True).path
    if model != DEFAULT_MODEL:
        raise ConfigError(f"--force fetches {DEFAULT_MODEL} anew, not {model}")
    return default_model.fetch(progress=True, force=True)
