"""Where a server is: the URL that a user gives, in the form that a connection needs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from treadle.errors import ConfigError

__all__ = ("Address",)

VERSION = re.compile(r"v\d+\w*")


@dataclass(frozen=True, slots=True)
class Address:
    """The place of a server. ``uds`` is the path of a unix socket, ``base`` ends like ``/v1``."""

    host: str
    port: int
    base: str
    tls: bool = False
    uds: str | None = None

    @classmethod
    def parse(cls, url: str) -> Address:
        """Read ``http://HOST:PORT[/PATH]``, ``https://…``, ``HOST:PORT`` or ``unix:PATH``.

        ``/v1`` is added unless the path has a version already. Raises ``ConfigError``.
        """
        if url.startswith("unix:"):
            if path := url.removeprefix("unix:"):
                return cls("localhost", 0, "/v1", uds=path)
            raise ConfigError("the URL is 'unix:'; write unix:PATH with the path of a socket")
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigError(f"the URL is {url!r}: {error}; write http://HOST:PORT") from error
        if parts.scheme not in ("http", "https") or not host or not host.isprintable():
            raise ConfigError(
                f"the URL is {url!r}; write http://HOST:PORT, https://HOST or unix:PATH"
            )
        if parts.username is not None or parts.query or parts.fragment:
            raise ConfigError(
                "the URL has a user, a query or a fragment, which are not sent; give a key with "
                "--api-key"
            )
        base = parts.path.rstrip("/")
        if re.search(r"[^!-~]", base):
            raise ConfigError(f"the URL is {url!r}; a path has no spaces and only ASCII, or %XX")
        if not any(VERSION.fullmatch(segment) for segment in base.split("/")):
            base += "/v1"
        tls = parts.scheme == "https"
        return cls(host, port or (443 if tls else 80), base, tls)

    def __str__(self) -> str:
        if self.uds is not None:
            return f"unix:{self.uds}"
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.base}"

    @property
    def authority(self) -> str:
        """The value of the header ``Host``."""
        if self.uds is not None:
            return self.host
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"
