"""Options that several commands share, under the names that vLLM's users know.

Each is also an environment variable, PREFIXKV_*; the command line wins.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from prefixkv.api.options.byte_size import parse_bytes
from prefixkv.config import DEFAULT_MODEL

Backend = Literal["auto", "triton", "cpu", "reference"]
DType = Literal["auto", "float32", "bfloat16", "float16", "float64"]


@dataclass(slots=True)
class Session:
    """What the error report of `main` needs to know."""

    debug: bool = False


def note_debug(context: typer.Context, debug: bool) -> bool:
    """Remember --debug wherever it stands on the line."""
    session = context.find_object(Session)
    if session is not None:
        session.debug = session.debug or debug
    return debug


def parse_size(text: str | int) -> int:
    """Return the bytes that `text` means, which a default says as a number already.

    Raises:
        typer.BadParameter: it means none.
    """
    try:
        return parse_bytes(str(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def choose_model(context: typer.Context, argument: str | None, option: str | None) -> str:
    """Return the model that the line means; a positional one beats the environment.

    Raises:
        typer.BadParameter: it is given twice and differs.
    """
    source = context.get_parameter_source("model")
    is_typed = source is not None and source.name == "COMMANDLINE"
    if argument and is_typed and option != argument:
        raise typer.BadParameter(f"{argument!r} and --model {option!r} are two models")
    return argument or option or DEFAULT_MODEL


DebugOption = Annotated[
    bool,
    typer.Option(
        "--debug", envvar="PREFIXKV_DEBUG", callback=note_debug, help="Show tracebacks of errors."
    ),
]
ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help=f"A folder, a Hugging Face id or a GGUF file.  [default: {DEFAULT_MODEL}]",
    ),
]
ModelOption = Annotated[
    str | None, typer.Option(envvar="PREFIXKV_MODEL", help="The same as MODEL.")
]
DTypeOption = Annotated[DType, typer.Option(envvar="PREFIXKV_DTYPE", help="Of weights and KV.")]
MaxModelLenOption = Annotated[
    int | None,
    typer.Option(
        envvar="PREFIXKV_MAX_MODEL_LEN",
        min=1,
        help="Prompt and output tokens of one request; the model's context if not given.",
    ),
]
BlockSizeOption = Annotated[
    int, typer.Option(envvar="PREFIXKV_BLOCK_SIZE", min=1, help="Tokens in a block.")
]
NumBlocksOption = Annotated[
    int | None,
    typer.Option(
        "--num-gpu-blocks-override",
        "--num-blocks",
        envvar=["PREFIXKV_NUM_BLOCKS", "PREFIXKV_NUM_GPU_BLOCKS_OVERRIDE"],
        min=1,
        help="Blocks in the pool, instead of an amount of memory.",
    ),
]
KVCacheMemoryOption = Annotated[
    int | None,
    typer.Option(
        parser=parse_size,
        metavar="SIZE",
        envvar="PREFIXKV_KV_CACHE_MEMORY_BYTES",
        help="Memory of the pool, like 2G or 512M.",
    ),
]
GPUMemoryOption = Annotated[
    float,
    typer.Option(
        "--gpu-memory-utilization",
        envvar="PREFIXKV_GPU_MEMORY_UTILIZATION",
        help="Share of a GPU's memory for weights, a step and the pool together.",
    ),
]
DeviceOption = Annotated[
    str,
    typer.Option(
        envvar="PREFIXKV_DEVICE",
        metavar="[auto|cpu|cuda|cuda:N]",
        help="Of the model and the pool; auto takes a GPU if there is one.",
    ),
]
MaxNumSeqsOption = Annotated[
    int, typer.Option(envvar="PREFIXKV_MAX_NUM_SEQS", min=1, help="Requests that run at once.")
]
MaxNumBatchedTokensOption = Annotated[
    int,
    typer.Option(envvar="PREFIXKV_MAX_NUM_BATCHED_TOKENS", min=1, help="Token budget of a step."),
]
MaxQueueOption = Annotated[
    int | None,
    typer.Option(
        "--max-queue",
        "--max-num-waiting",
        envvar="PREFIXKV_MAX_QUEUE",
        min=1,
        help="Requests that may wait before others get 429; any number if not given.",
    ),
]
PrefixCachingOption = Annotated[
    bool,
    typer.Option(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        envvar="PREFIXKV_ENABLE_PREFIX_CACHING",
        help="Whether requests find what others computed.",
    ),
]
MaxLeasedShareOption = Annotated[
    float,
    typer.Option(
        envvar="PREFIXKV_MAX_LEASED_SHARE",
        min=0,
        max=1,
        help="Share of the pool that breakpoints of requests may keep from eviction.",
    ),
]
MaxLeaseTtlOption = Annotated[
    float,
    typer.Option(
        "--max-lease-ttl",
        envvar="PREFIXKV_MAX_LEASE_TTL",
        min=0,
        metavar="SECONDS",
        help="What longer lifetimes of breakpoints are cut to.",
    ),
]
BackendOption = Annotated[
    Backend, typer.Option(envvar="PREFIXKV_ATTENTION_BACKEND", help="Attention kernels.")
]
BatchInvariantOption = Annotated[
    bool,
    typer.Option(
        "--batch-invariant-attention",
        envvar="PREFIXKV_BATCH_INVARIANT_ATTENTION",
        help="The same bits of attention whatever else is in a step; slower.",
    ),
]
SeedOption = Annotated[
    int | None, typer.Option(envvar="PREFIXKV_SEED", help="Seed of sampling; random if not given.")
]
ThreadsOption = Annotated[
    int | None,
    typer.Option(envvar="PREFIXKV_THREADS", min=1, help="CPU threads; all cores if not given."),
]
