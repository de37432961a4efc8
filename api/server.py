"""`prefixkv serve`: take the port, load the model, serve until a signal, end cleanly."""

import asyncio
import gc
import json
import math
import shlex
import signal
import socket
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import uvicorn
from rich.console import Console

from prefixkv.api.app import create_app
from prefixkv.api.engine_interface import ServingEngine
from prefixkv.config import EngineConfig
from prefixkv.errors import ConfigError

# clients keep idle connections for 5 to 60 s; closing first would race with their next request
KEEP_ALIVE_S = 75

_UNSPECIFIED = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Where to listen and how to end.

    Args:
        served_model_names: names in the API; empty means the model as it was given.
        host: a name or an address.
        port: 0 takes any free one.
        log_level: of uvicorn.
        shutdown_timeout_s: how long running requests may go on after a signal.
    """

    served_model_names: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    log_level: str = "info"
    shutdown_timeout_s: float = 5.0


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

    The port is taken first: loading takes long, and a port in use should show at once.

    Raises:
        ConfigError: the address cannot be listened on, or an engine option is wrong.
        ModelError: the model cannot be loaded.
    """
    with bind(options.host, options.port) as listener, _on_signals(signal.default_int_handler):
        try:
            engine = build_engine(config)
            serve(engine, options.served_model_names or (config.model,), listener, options)
        except KeyboardInterrupt:
            return


def bind(host: str, port: int) -> socket.socket:
    """Return a bound socket that does not listen yet: connections are refused while loading.

    Raises:
        ConfigError: naming host and port.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"cannot listen on {_authority(host, port)}: {reason}") from error
    return listener


def serve(
    engine: ServingEngine, names: tuple[str, ...], listener: socket.socket, options: ServerOptions
) -> None:
    """Serve `engine` on `listener` until a signal; start it before and stop it after."""
    config = uvicorn.Config(
        create_app(engine, names),
        log_level=options.log_level,
        lifespan="on",
        ws="none",
        timeout_keep_alive=KEEP_ALIVE_S,
        # a last resort: requests end with an error of their own before
        timeout_graceful_shutdown=math.ceil(options.shutdown_timeout_s) + 5,
    )
    port = listener.getsockname()[1]
    server = _Server(
        config, engine, options.shutdown_timeout_s, lambda: announce(options.host, port, names[0])
    )

    async def start_and_serve() -> None:
        # not left to the application's lifespan, where uvicorn would print a failure's traceback
        await engine.start()
        await server.serve([listener])

    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(start_and_serve())


def announce(host: str, port: int, model: str) -> None:
    """Print what to paste next."""
    base_url = f"http://{_authority(_UNSPECIFIED.get(host, host), port)}/v1"
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello!"}]})
    lines = (
        f"prefixkv serves {model} at {base_url}",
        "",
        f"  curl {base_url}/chat/completions -H 'Content-Type: application/json' "
        f"-d {shlex.quote(body)}",
        "",
        f'  openai.OpenAI(base_url="{base_url}", api_key="none")',
    )
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    for line in lines:
        console.print(line)


class _Server(uvicorn.Server):
    """uvicorn that says when it is ready, and ends requests and itself without violence."""

    def __init__(
        self,
        config: uvicorn.Config,
        engine: ServingEngine,
        shutdown_timeout_s: float,
        on_ready: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._engine = engine
        self._shutdown_timeout_s = shutdown_timeout_s
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        tasks: list[asyncio.Task[None]] = []

        def stop_engine() -> None:
            # what still runs then gets an error, in its stream or as a status
            tasks.append(asyncio.create_task(self._engine.stop()))

        timer = asyncio.get_running_loop().call_later(self._shutdown_timeout_s, stop_engine)
        await super().shutdown(sockets)
        timer.cancel()
        await asyncio.gather(*tasks)

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        # the original raises the signal again at the end, which would be the exit status
        with _on_signals(self.handle_exit):
            yield


@contextmanager
def _on_signals(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {sig: signal.signal(sig, handler) for sig in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for sig, old in previous.items():
            signal.signal(sig, old)


def _authority(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
