"""The files of TLS: what uvicorn could not serve with is refused before the model loads."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from treadle.errors import ConfigError
from treadle_server.config import server_from_options
from treadle_server.run import serve_engine
from treadle_server.tls import check_tls

FILES = Path(__file__).with_name("certificates")
CERTIFICATE, KEY = str(FILES / "server.pem"), str(FILES / "server.key")


def load_model() -> NoReturn:
    raise AssertionError("the model was loaded")


def pipe(folder: Path) -> str:
    os.mkfifo(folder / "pipe")
    return str(folder / "pipe")


def garbage(folder: Path) -> str:
    (folder / "garbage").write_text("-----BEGIN CERTIFICATE-----\nx\n")
    return str(folder / "garbage")


def large(folder: Path) -> str:
    with (folder / "large").open("wb") as file:
        file.truncate(1 << 30)
    return str(folder / "large")


def test_a_key_and_its_certificate_are_taken() -> None:
    check_tls(server_from_options())
    check_tls(server_from_options(ssl_certfile=CERTIFICATE, ssl_keyfile=KEY))
    options = {"ssl_certfile": CERTIFICATE, "ssl_keyfile": KEY, "ssl_ca_certs": CERTIFICATE}
    check_tls(server_from_options(options))


@pytest.mark.parametrize("option", ["ssl_certfile", "ssl_keyfile", "ssl_ca_certs"])
@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (pipe, "{} is '.*', which cannot be read: it is a named pipe"),
        (str, "{} is '.*', which cannot be read: it is a folder"),
        (large, "{} is '.*', which cannot be read: it has 1073741824 bytes"),
        (lambda folder: "/dev/zero", "{} is '/dev/zero', which cannot be read: it is a device"),
        (lambda folder: str(folder / "gone"), "{} is '.*gone', which cannot be read: No such file"),
        (lambda folder: "a\0b", "{} is .*embedded null"),
        (garbage, "{} (is )?'.*not in PEM form"),
    ],
)
def test_a_file_that_cannot_be_used(
    tmp_path: Path, option: str, make: Callable[[Path], str], problem: str
) -> None:
    options = {"ssl_certfile": CERTIFICATE, "ssl_keyfile": KEY, option: make(tmp_path)}
    with pytest.raises(ConfigError, match=problem.format(option)):
        serve_engine(load_model, server_from_options(options, port=0))


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        ("other.key", "the key does not belong to the certificate"),
        ("encrypted.key", "the key is encrypted; decrypt it"),
        ("server.pem", "a certificate or a key is missing, or not in PEM form"),
    ],
)
def test_a_key_that_does_not_fit(key: str, problem: str) -> None:
    config = server_from_options(ssl_certfile=CERTIFICATE, ssl_keyfile=str(FILES / key), port=0)
    with pytest.raises(ConfigError, match=f"ssl_certfile .* and ssl_keyfile .*{problem}"):
        serve_engine(load_model, config)


def test_authorities_without_a_certificate_are_no_protection() -> None:
    with pytest.raises(ConfigError, match="ssl_ca_certs needs ssl_certfile and ssl_keyfile"):
        server_from_options(ssl_ca_certs=CERTIFICATE)
