"""The options of `prefixkv serve` that are not the engine's."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import typer

from prefixkv.api.options.cli_options import parse_size

MAX_BODY_BYTES = 32 * 2**20
TOKEN_MEMORY_BYTES = 64 * 2**20

LogFormat = Literal["text", "json"]
LogLevel = Literal["critical", "error", "warning", "info", "debug"]


def _split_environment(
    context: typer.Context, parameter: typer.CallbackParam, values: list[str] | None
) -> list[str] | None:
    """Split the value of a variable at commas; what stands on the line is taken as it is."""
    source = context.get_parameter_source(parameter.name or "")
    if not values or source is None or source.name != "ENVIRONMENT":
        return values
    return [part.strip() for value in values for part in value.split(",") if part.strip()]


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Where to listen, whom to serve, what to log and how to end."""

    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            envvar="PREFIXKV_SERVED_MODEL_NAME",
            help="Name in the API; may be given several times.  [default: MODEL]",
        ),
    ] = None
    host: Annotated[str, typer.Option(envvar="PREFIXKV_HOST")] = "127.0.0.1"
    port: Annotated[
        int, typer.Option(envvar="PREFIXKV_PORT", min=0, max=65535, help="0 takes a free one.")
    ] = 8000
    root_path: Annotated[
        str,
        typer.Option(
            envvar="PREFIXKV_ROOT_PATH",
            metavar="PATH",
            help="Prefix that a proxy takes off before it passes a request on.",
        ),
    ] = ""
    ssl_keyfile: Annotated[
        Path | None, typer.Option(envvar="PREFIXKV_SSL_KEYFILE", help="Private key, for https.")
    ] = None
    ssl_certfile: Annotated[
        Path | None, typer.Option(envvar="PREFIXKV_SSL_CERTFILE", help="Certificate, for https.")
    ] = None
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar=["PREFIXKV_API_KEY", "VLLM_API_KEY"],
            metavar="KEY",
            callback=_split_environment,
            show_default=False,
            help="Serve only who shows a key; may be given several times, each a tenant of its "
            "own. Others can see the line: rather use the variable (with commas), or a file.",
        ),
    ] = field(default=None, repr=False)
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            envvar="PREFIXKV_API_KEY_FILE",
            help="TOML, JSON or YAML with a list 'keys': name, key or sha256, salt, max_requests.",
        ),
    ] = None
    admin_api_key: Annotated[
        str | None,
        typer.Option(
            envvar="PREFIXKV_ADMIN_API_KEY",
            metavar="KEY",
            show_default=False,
            help="Key of the operator, for POST /reset_prefix_cache; without it that is refused.",
        ),
    ] = field(default=None, repr=False)
    max_requests_per_key: Annotated[
        int | None,
        typer.Option(
            envvar="PREFIXKV_MAX_REQUESTS_PER_KEY",
            min=1,
            help="Requests of one API key that may run or wait; others get 429.",
        ),
    ] = None
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(
            envvar="PREFIXKV_ALLOWED_ORIGINS",
            help="Origin of web pages that may read answers (CORS), a JSON list of them, or '*'; "
            "may be given several times. None if not given.",
        ),
    ] = None
    max_body_bytes: Annotated[
        int,
        typer.Option(
            parser=parse_size,
            metavar="SIZE",
            envvar="PREFIXKV_MAX_BODY_BYTES",
            show_default="32M",
            help="Larger request bodies get 413.",
        ),
    ] = MAX_BODY_BYTES
    token_memory_bytes: Annotated[
        int,
        typer.Option(
            parser=parse_size,
            metavar="SIZE",
            envvar="PREFIXKV_TOKEN_MEMORY_BYTES",
            show_default="64M",
            help="For answers of chats as token ids, which their next turns take up; 0 for none.",
        ),
    ] = TOKEN_MEMORY_BYTES
    shutdown_timeout: Annotated[
        float,
        typer.Option(
            envvar="PREFIXKV_SHUTDOWN_TIMEOUT",
            min=0,
            help="Seconds that running requests may go on after a signal.",
        ),
    ] = 5.0
    log_format: Annotated[
        LogFormat,
        typer.Option(envvar="PREFIXKV_LOG_FORMAT", help="One JSON object a line, or text."),
    ] = "text"
    log_level: Annotated[
        LogLevel, typer.Option(envvar="PREFIXKV_LOG_LEVEL", help="Of prefixkv itself.")
    ] = "info"
    uvicorn_log_level: Annotated[
        LogLevel,
        typer.Option(
            envvar="PREFIXKV_UVICORN_LOG_LEVEL",
            help="Of the HTTP server, and of the line that each request leaves at info.",
        ),
    ] = "info"
    disable_access_log_for_endpoints: Annotated[
        str,
        typer.Option(
            envvar="PREFIXKV_DISABLE_ACCESS_LOG_FOR_ENDPOINTS",
            metavar="PATHS",
            help="Paths, with commas between them, whose requests leave no line.",
        ),
    ] = "/health,/ready,/metrics"
