"""The `prefixkv` command. Heavy imports wait until a command needs them, so that help is fast."""

import atexit
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated

import typer

from prefixkv.api.cli_options import (
    BackendOption,
    BatchInvariantOption,
    BlockSizeOption,
    DebugOption,
    DeviceOption,
    DTypeOption,
    GPUMemoryOption,
    KVCacheMemoryOption,
    LogLevel,
    MaxModelLenOption,
    MaxNumBatchedTokensOption,
    MaxNumSeqsOption,
    ModelArgument,
    ModelOption,
    NumBlocksOption,
    PrefixCachingOption,
    SeedOption,
    Session,
    ThreadsOption,
    choose_model,
)
from prefixkv.config import EngineConfig
from prefixkv.errors import PrefixKVError

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    # rich's table cuts option names short on a terminal of 80 columns
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: with 1 after an error of ours, told in one line."""
    atexit.register(_silence_triton)  # first registered, last called
    session = Session()
    try:
        app(arguments, prog_name="prefixkv", obj=session)
    except (PrefixKVError, OSError) as error:
        if session.debug:
            traceback.print_exc()
        else:
            message = " ".join(str(error).split()) or type(error).__name__
            sys.stderr.write(f"prefixkv: {message}\n")
        sys.exit(1)


def _silence_triton() -> None:
    """Triton 3.9, which torch imports if it is there, lists leaks of its own at the very end."""
    if "triton" in sys.modules:
        sys.stderr.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(version("prefixkv"))
        raise typer.Exit


@app.callback()
def start(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
    debug: DebugOption = False,
) -> None:
    """LLM inference around a prefix-sharing, copy-on-write KV cache."""


@app.command()
def serve(
    context: typer.Context,
    model_argument: ModelArgument = None,
    model: ModelOption = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            envvar="PREFIXKV_SERVED_MODEL_NAME",
            help="Name in the API; may be given several times.  [default: MODEL]",
        ),
    ] = None,
    host: Annotated[str, typer.Option(envvar="PREFIXKV_HOST")] = "127.0.0.1",
    port: Annotated[int, typer.Option(envvar="PREFIXKV_PORT", min=0, max=65535)] = 8000,
    dtype: DTypeOption = "auto",
    device: DeviceOption = "auto",
    max_model_len: MaxModelLenOption = None,
    block_size: BlockSizeOption = 16,
    num_blocks: NumBlocksOption = None,
    kv_cache_memory_bytes: KVCacheMemoryOption = None,
    gpu_memory_utilization: GPUMemoryOption = 0.9,
    max_num_seqs: MaxNumSeqsOption = 64,
    max_num_batched_tokens: MaxNumBatchedTokensOption = 2048,
    max_queue: Annotated[
        int | None,
        typer.Option(
            "--max-queue",
            "--max-num-waiting",
            envvar="PREFIXKV_MAX_QUEUE",
            min=1,
            help="Requests that may wait before others get 429; any number if not given.",
        ),
    ] = None,
    enable_prefix_caching: PrefixCachingOption = True,
    attention_backend: BackendOption = "auto",
    batch_invariant_attention: BatchInvariantOption = False,
    seed: SeedOption = None,
    threads: ThreadsOption = None,
    shutdown_timeout: Annotated[
        float,
        typer.Option(
            envvar="PREFIXKV_SHUTDOWN_TIMEOUT",
            min=0,
            help="Seconds that running requests may go on after a signal.",
        ),
    ] = 5.0,
    log_level: Annotated[LogLevel, typer.Option(envvar="PREFIXKV_LOG_LEVEL")] = "info",
    uvicorn_log_level: Annotated[
        LogLevel, typer.Option(envvar="PREFIXKV_UVICORN_LOG_LEVEL")
    ] = "info",
    debug: DebugOption = False,
) -> None:
    """Serve a model over HTTP, in the shapes of OpenAI's API."""
    config = EngineConfig(
        model=choose_model(context, model_argument, model),
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=num_blocks,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        gpu_memory_utilization=gpu_memory_utilization,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_waiting=max_queue,
        enable_prefix_caching=enable_prefix_caching,
        attention_backend=attention_backend,
        batch_invariant_attention=batch_invariant_attention,
        seed=seed,
    )
    _set_threads(threads)
    _set_log_level(log_level)
    from prefixkv.api.server import ServerOptions, run

    options = ServerOptions(
        served_model_names=tuple(served_model_name or ()),
        host=host,
        port=port,
        log_level=uvicorn_log_level,
        shutdown_timeout_s=shutdown_timeout,
    )
    run(config, options)


@app.command()
def generate(
    context: typer.Context,
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT...")],
    model: ModelOption = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put each prompt to the model as a chat.")
    ] = False,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="16 if not given; no limit for chats.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(min=0)] = None,
    top_p: Annotated[float | None, typer.Option()] = None,
    top_k: Annotated[int | None, typer.Option()] = None,
    min_p: Annotated[float | None, typer.Option()] = None,
    stop: Annotated[list[str] | None, typer.Option(help="May be given several times.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos")] = False,
    seed: SeedOption = None,
    dtype: DTypeOption = "auto",
    device: DeviceOption = "auto",
    max_model_len: MaxModelLenOption = None,
    block_size: BlockSizeOption = 16,
    num_blocks: NumBlocksOption = None,
    kv_cache_memory_bytes: KVCacheMemoryOption = None,
    gpu_memory_utilization: GPUMemoryOption = 0.9,
    attention_backend: BackendOption = "auto",
    batch_invariant_attention: BatchInvariantOption = False,
    threads: ThreadsOption = None,
    debug: DebugOption = False,
) -> None:
    """Print what the model makes of each PROMPT."""
    config = EngineConfig(
        model=choose_model(context, None, model),
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=num_blocks,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        gpu_memory_utilization=gpu_memory_utilization,
        attention_backend=attention_backend,
        batch_invariant_attention=batch_invariant_attention,
    )
    _set_threads(threads)
    from prefixkv.api.offline import generate_and_print
    from prefixkv.api.schemas import GenerationRequest, parse_request
    from prefixkv.api.server import build_engine

    fields = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "stop": stop,
        "ignore_eos": ignore_eos,
        "seed": seed,
    }
    request = parse_request(GenerationRequest, fields)
    generate_and_print(build_engine(config), prompts, request, is_chat=chat, out=sys.stdout)


@app.command()
def pull(
    context: typer.Context,
    model_argument: ModelArgument = None,
    model: ModelOption = None,
    force: Annotated[bool, typer.Option("--force", help="Fetch it even if it is there.")] = False,
    debug: DebugOption = False,
) -> None:
    """Fetch a model into the cache folder, and print where it lies."""
    from prefixkv.api.model_summary import pull_model

    typer.echo(pull_model(choose_model(context, model_argument, model), force=force))


@app.command()
def info(
    context: typer.Context,
    model_argument: ModelArgument = None,
    model: ModelOption = None,
    dtype: DTypeOption = "auto",
    device: DeviceOption = "auto",
    max_model_len: MaxModelLenOption = None,
    block_size: BlockSizeOption = 16,
    num_blocks: NumBlocksOption = None,
    kv_cache_memory_bytes: KVCacheMemoryOption = None,
    gpu_memory_utilization: GPUMemoryOption = 0.9,
    debug: DebugOption = False,
) -> None:
    """Print the shape of a model and what its KV cache costs."""
    from rich.console import Console

    from prefixkv.api.model_summary import summarize

    config = EngineConfig(
        model=choose_model(context, model_argument, model),
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=num_blocks,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        gpu_memory_utilization=gpu_memory_utilization,
    )
    Console().print(summarize(config).table())


def _set_threads(threads: int | None) -> None:
    # read by OpenMP when torch and numba are imported, which they are not yet
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = os.environ["NUMBA_NUM_THREADS"] = str(threads)


def _set_log_level(level: str) -> None:
    logging.basicConfig(format="%(levelname)s: %(name)s: %(message)s")
    logging.getLogger("prefixkv").setLevel(level.upper())
