"""The files of TLS, checked before the model loads: a wrong one is reported at once."""

from __future__ import annotations

import ssl
from pathlib import Path

from treadle.errors import ConfigError
from treadle.regular_files import check_regular
from treadle_server.config import ServerConfig

__all__ = ("check_tls",)

OPTIONS = ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
MAX_BYTES = 2**20


def check_tls(config: ServerConfig) -> None:
    """Raise ``ConfigError`` if uvicorn could not serve with the certificate, key and authorities."""
    for option in OPTIONS:
        name = getattr(config, option)
        if name is None:
            continue
        try:
            path = Path(name)
            check_regular(path, MAX_BYTES)
            path.open("rb").close()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(
                f"option {option} is {name!r}, which cannot be read: {reason}"
            ) from error
    if config.ssl_certfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password=_no_password)
    except (ssl.SSLError, OSError, ValueError) as error:
        raise ConfigError(
            f"options ssl_certfile {config.ssl_certfile!r} and ssl_keyfile {config.ssl_keyfile!r} cannot "
            f"be used: {_problem(error)}"
        ) from error
    if config.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(
                f"option ssl_ca_certs is {config.ssl_ca_certs!r}, which cannot be used: "
                f"{_problem(error)}"
            ) from error


def _no_password() -> str:
    raise ValueError("the key is encrypted; decrypt it, for example with openssl pkey")


def _problem(error: Exception) -> str:
    if not isinstance(error, ssl.SSLError):
        return str(error) or type(error).__name__
    if error.reason in ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH"):
        return "the key does not belong to the certificate"
    return f"a certificate or a key is missing, or not in PEM form ({error})"
