"""Groups of options: each option is declared once, as the field of a dataclass.

A command that has a parameter of such a class takes all its options; see `takes_option_groups`.
"""

import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints

import typer

from prefixkv.api.options.cli_options import (
    BackendOption,
    BatchInvariantOption,
    BlockSizeOption,
    DeviceOption,
    DTypeOption,
    GPUMemoryOption,
    KVCacheMemoryOption,
    MaxLeasedShareOption,
    MaxLeaseTtlOption,
    MaxModelLenOption,
    MaxNumBatchedTokensOption,
    MaxNumSeqsOption,
    MaxQueueOption,
    ModelOption,
    NumBlocksOption,
    PrefixCachingOption,
    SeedOption,
    ThreadsOption,
    choose_model,
)
from prefixkv.config import EngineConfig


def takes_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` with the fields of its dataclasses as parameters, which typer can read."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name in groups:
            parameters += map(_as_parameter, fields(groups[parameter.name]))
        else:
            hint = hints[parameter.name]
            parameters.append(parameter.replace(annotation=hint, kind=parameter.KEYWORD_ONLY))

    @wraps(command)
    def run(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _as_parameter(field: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(field.name, kind, default=field.default, annotation=field.type)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model and the pool. Fields are called as those of `EngineConfig`."""

    model: ModelOption = None
    dtype: DTypeOption = "auto"
    device: DeviceOption = "auto"
    max_model_len: MaxModelLenOption = None
    block_size: BlockSizeOption = 16
    num_blocks: NumBlocksOption = None
    kv_cache_memory_bytes: KVCacheMemoryOption = None
    gpu_memory_utilization: GPUMemoryOption = 0.9

    def engine_config(self, context: typer.Context, model: str | None = None) -> EngineConfig:
        """Return the configuration; `model` is the positional argument.

        Raises:
            ConfigError: options that do not go together.
            typer.BadParameter: the model is given twice and differs.
        """
        known = {field.name for field in fields(EngineConfig)}
        options = {name: value for name, value in asdict(self).items() if name in known}
        return EngineConfig(**options | {"model": choose_model(context, model, self.model)})


@dataclass(frozen=True, kw_only=True)
class ComputeOptions(ModelOptions):
    """What also says how to compute."""

    attention_backend: BackendOption = "auto"
    batch_invariant_attention: BatchInvariantOption = False
    threads: ThreadsOption = None


@dataclass(frozen=True, kw_only=True)
class EngineOptions(ComputeOptions):
    """All options of an engine that serves many."""

    max_num_seqs: MaxNumSeqsOption = 64
    max_num_batched_tokens: MaxNumBatchedTokensOption = 2048
    max_num_waiting: MaxQueueOption = None
    enable_prefix_caching: PrefixCachingOption = True
    max_leased_share: MaxLeasedShareOption = 0.5
    max_lease_ttl_s: MaxLeaseTtlOption = 3600
    seed: SeedOption = None
