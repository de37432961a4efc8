"""The address that a server listens on: taken before the model is loaded."""

import socket

from prefixkv.errors import ConfigError


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
        raise ConfigError(f"cannot listen on {authority(host, port)}: {reason}") from error
    return listener


def authority(host: str, port: int) -> str:
    """Return host and port as a URL spells them."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
