"""`prefixkv serve`: take the port, load the model, serve until a signal, end cleanly."""

import asyncio
import gc
import logging
import signal
import socket
import ssl
import sys
from functools import partial

import uvicorn
from fastapi import FastAPI

from prefixkv.api.access.key_file import collect_keys
from prefixkv.api.access.origins import parse_origins
from prefixkv.api.app import create_app
from prefixkv.api.engine_interface import ServingEngine
from prefixkv.api.options.server_options import ServerOptions
from prefixkv.api.serving.announcement import announce
from prefixkv.api.serving.draining import Drain
from prefixkv.api.serving.graceful_server import GracefulServer, on_signals
from prefixkv.api.serving.listener import bind
from prefixkv.api.serving.log_format import configure_logs
from prefixkv.config import EngineConfig
from prefixkv.errors import ConfigError, PrefixKVError

# clients keep idle connections for 5 to 60 s; closing first would race with their next request
KEEP_ALIVE_S = 75

# for clients that do not take what was sent to them before the engine was stopped
LAST_RESORT_S = 5

logger = logging.getLogger("prefixkv.api")


def build_engine(config: EngineConfig) -> ServingEngine:
    """Load the model and return an engine that is not started.

    Raises:
        ConfigError: an option that cannot be honoured.
        ModelError: the model cannot be loaded.
    """
    # seconds of imports, which a wrong option or a port in use should not wait for
    from prefixkv.async_engine import AsyncEngine
    from prefixkv.engine import Engine

    engine = AsyncEngine(Engine.load(config, progress=True))
    # what is there now stays: no collection of garbage need ever walk the blocks of the pool again
    gc.freeze()
    return engine


def run(config: EngineConfig, options: ServerOptions) -> None:
    """Serve until SIGINT or SIGTERM, then return.

    What can be wrong is looked at first: loading takes long, and a port in use should show at once.

    Raises:
        ConfigError: the address cannot be listened on, or an option is wrong.
        ModelError: the model cannot be loaded.
    """
    configure_logs(options.log_format, options.log_level, options.uvicorn_log_level)
    try:
        _run(config, options)
    except KeyboardInterrupt:
        return
    except (PrefixKVError, OSError) as error:
        if options.log_format == "text":
            raise  # the command tells it in one line
        logger.critical("%s", error)
        sys.exit(1)


def _run(config: EngineConfig, options: ServerOptions) -> None:
    keys = collect_keys(
        options.api_key or (),
        options.api_key_file,
        options.admin_api_key,
        options.max_requests_per_key,
    )
    origins = parse_origins(options.allowed_origins or ())
    _require_certificate(options)
    with bind(options.host, options.port) as listener, on_signals(signal.default_int_handler):
        engine = build_engine(config)
        names = options.served_model_name or [config.model]
        drain = Drain()
        app = create_app(
            engine,
            names,
            max_body_bytes=options.max_body_bytes,
            token_memory_bytes=options.token_memory_bytes,
            keys=keys,
            allowed_origins=origins,
            silent_paths=options.disable_access_log_for_endpoints.split(","),
            drain=drain,
        )
        port = listener.getsockname()[1]
        on_ready = partial(announce, options, port, names[0], needs_key=keys.are_required)
        settings = _uvicorn_config(app, options)
        server = GracefulServer(settings, engine, drain, options.shutdown_timeout, on_ready)
        _serve(server, engine, listener)


def _serve(server: GracefulServer, engine: ServingEngine, listener: socket.socket) -> None:
    async def start_and_serve() -> None:
        # not left to the application's lifespan, where uvicorn would print a failure's traceback
        await engine.start()
        await server.serve([listener])

    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(start_and_serve())


def _uvicorn_config(app: FastAPI, options: ServerOptions) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,
        log_level=options.uvicorn_log_level,
        access_log=False,  # the application logs its requests itself
        lifespan="on",
        ws="none",
        root_path=options.root_path,
        ssl_keyfile=options.ssl_keyfile,
        ssl_certfile=options.ssl_certfile,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=LAST_RESORT_S,
    )


def _require_certificate(options: ServerOptions) -> None:
    """Raise ConfigError unless the files for https are both there, or none of them."""
    if options.ssl_certfile is None and options.ssl_keyfile is None:
        return
    if options.ssl_certfile is None:
        raise ConfigError(f"--ssl-keyfile {options.ssl_keyfile} needs --ssl-certfile")
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
    except OSError as error:
        raise ConfigError(
            f"no https with --ssl-certfile {options.ssl_certfile} and "
            f"--ssl-keyfile {options.ssl_keyfile}: {error}"
        ) from None
