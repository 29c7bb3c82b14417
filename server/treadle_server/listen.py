"""Sockets, bound before the model is loaded: a port in use is reported at once, not after minutes."""

from __future__ import annotations

import contextlib
import os
import socket
import stat

from treadle.errors import ConfigError
from treadle_server.config import ServerConfig

__all__ = ("bind", "url_of")


def bind(config: ServerConfig) -> socket.socket:
    """A bound socket that does not listen yet. Raises ``ConfigError``."""
    if config.uds is not None:
        return bind_unix(config.uds)
    try:
        addresses = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise ConfigError(
            f"host {config.host!r} is not an address of this machine: {error.strerror}"
        ) from error
    family, kind, proto, _, address = addresses[0]
    bound = socket.socket(family, kind, proto)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port}: {os.strerror(error.errno or 0)}; "
            "choose another --port (0 takes a free one)"
        ) from error
    return bound


def bind_unix(path: str) -> socket.socket:
    """Take over a socket file that nobody listens on; never another kind of file."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise ConfigError(f"uds {path!r} exists and is not a socket; choose another path")
        if listened(path):
            raise ConfigError(f"another server listens on {path!r}; stop it or choose another path")
        os.unlink(path)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        bound.bind(path)
        os.chmod(path, 0o660)
    except OSError as error:
        bound.close()
        raise ConfigError(f"cannot listen on {path!r}: {os.strerror(error.errno or 0)}") from error
    return bound


def listened(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(path) == 0


def url_of(config: ServerConfig, bound: socket.socket) -> str:
    """Return the URL of the server."""
    if config.uds is not None:
        return f"unix:{config.uds}"
    host = f"[{config.host}]" if ":" in config.host else config.host
    scheme = "https" if config.ssl_certfile else "http"
    return f"{scheme}://{host}:{bound.getsockname()[1]}{config.root_path}"
