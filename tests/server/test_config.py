from __future__ import annotations

import socket
from pathlib import Path

import pytest

from treadle.errors import ConfigError
from treadle_server.config import ServerConfig, server_from_options
from treadle_server.listen import bind


def test_a_key_is_never_shown() -> None:
    keys = {"api_key": ["s3cret-a", "s3cret-b"], "admin_api_key": ["s3cret-c"]}
    text = repr(server_from_options(keys))
    assert "s3cret" not in text
    assert "['***', '***']" in text and "admin_api_key=['***']" in text


def test_keys_come_from_the_environment_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_API_KEY", "one, two")
    assert server_from_options().api_key == ["one", "two"]
    assert server_from_options(api_key=["three"]).api_key == ["three"]
    monkeypatch.setenv("TREADLE_ADMIN_API_KEY", "boss")
    config = server_from_options()
    assert (config.api_key, config.admin_api_key) == (["one", "two"], ["boss"])


def test_every_option_is_described() -> None:
    hints = ServerConfig.__annotations__
    assert [name for name in hints if "description=" not in str(hints[name])] == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"port": 70000}, "option port is 70000"),
        ({"host": "0.0.0.0"}, "--api-key"),
        ({"host": "::"}, "--insecure"),
        ({"api_key": ["a", " "]}, "empty key"),
        ({"admin_api_key": [""]}, "admin_api_key holds an empty key"),
        ({"api_key": ["a", "b"], "admin_api_key": ["b"]}, "a key of their own"),
        ({"ssl_keyfile": "k"}, "ssl_certfile"),
        ({"root_path": "llm/"}, "begin with /"),
        ({"drain_timeout": -1}, "option drain_timeout is -1"),
        ({"nonsense": 1}, "no option 'nonsense'"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        server_from_options(options)


def test_a_public_address_needs_a_key_or_a_word() -> None:
    assert server_from_options(host="0.0.0.0", api_key=["k"]).host == "0.0.0.0"
    assert server_from_options(host="0.0.0.0", insecure=True).insecure


def test_a_taken_port_is_told_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            bind(server_from_options(port=port))


def test_a_unix_socket_replaces_a_dead_one_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "treadle.sock"
    config = server_from_options(uds=str(path))
    first = bind(config)
    first.close()  # its file stays behind
    with bind(config) as second:
        second.listen()
        with pytest.raises(ConfigError, match="another server"):
            bind(config)
    path.unlink()
    path.write_text("precious")
    with pytest.raises(ConfigError, match="not a socket"):
        bind(config)
    assert path.read_text() == "precious"
