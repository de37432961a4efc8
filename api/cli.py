"""The `prefixkv` command. Heavy imports wait until a command needs them, so that help is fast."""

import atexit
import os
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated

import typer

from prefixkv.api.options.cli_options import (
    DebugOption,
    ModelArgument,
    ModelOption,
    SeedOption,
    Session,
    choose_model,
)
from prefixkv.api.options.config_file import ConfigOption
from prefixkv.api.options.option_groups import (
    ComputeOptions,
    EngineOptions,
    ModelOptions,
    takes_option_groups,
)
from prefixkv.api.options.server_options import ServerOptions
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
@takes_option_groups
def serve(
    context: typer.Context,
    engine: EngineOptions,
    options: ServerOptions,
    model_argument: ModelArgument = None,
    config: ConfigOption = None,
    debug: DebugOption = False,
) -> None:
    """Serve a model over HTTP, in the shapes of OpenAI's API."""
    engine_config = engine.engine_config(context, model_argument)
    _set_threads(engine.threads)
    from prefixkv.api.serving.server import run

    run(engine_config, options)


@app.command()
@takes_option_groups
def generate(
    context: typer.Context,
    engine: ComputeOptions,
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT...")],
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
    debug: DebugOption = False,
) -> None:
    """Print what the model makes of each PROMPT."""
    config = engine.engine_config(context)
    _set_threads(engine.threads)
    from prefixkv.api.offline import generate_and_print
    from prefixkv.api.requests.schemas import GenerationRequest, parse_request
    from prefixkv.api.serving.server import build_engine

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
@takes_option_groups
def info(
    context: typer.Context,
    engine: ModelOptions,
    model_argument: ModelArgument = None,
    debug: DebugOption = False,
) -> None:
    """Print the shape of a model and what its KV cache costs."""
    from rich.console import Console

    from prefixkv.api.model_summary import summarize

    Console().print(summarize(engine.engine_config(context, model_argument)).table())


def _set_threads(threads: int | None) -> None:
    # read by OpenMP when torch and numba are imported, which they are not yet
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = os.environ["NUMBA_NUM_THREADS"] = str(threads)
