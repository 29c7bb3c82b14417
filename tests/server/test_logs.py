"""The log: one form for every line, counts in place of floods, request ids, and no secrets."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import logging.config
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted import ScriptedEngine
from serving import events, serving, until

from treadle.api.stats import EngineStats
from treadle.errors import ConfigError, QueueFullError
from treadle.processes.logs import LogSetup
from treadle.processes.spawn import spawn
from treadle_server.logs import (
    BURST,
    WINDOW_SECONDS,
    JSONFormatter,
    LogSettings,
    StormHandler,
    TextFormatter,
    request_id,
    start,
)
from treadle_server.stats_log import StatsLog

SECRET = "xyzzy-a-secret-of-the-client"
KEY = "k-0123456789-of-the-operator"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.RootLogger]:
    """A process that has not logged yet; what it sets up is undone."""
    root = logging.RootLogger(logging.WARNING)
    manager = logging.Manager(root)
    monkeypatch.setattr(logging, "root", root)
    monkeypatch.setattr(logging.Logger, "root", root)
    monkeypatch.setattr(logging.Logger, "manager", manager)
    factory = logging.getLogRecordFactory()
    logging.captureWarnings(False)  # a server in this process may have switched it on
    with warnings.catch_warnings():
        yield root
    logging.captureWarnings(False)
    logging.setLoggerClass(logging.Logger)
    logging.setLogRecordFactory(factory)


@pytest.fixture
def storm(monkeypatch: pytest.MonkeyPatch) -> tuple[StormHandler, Clock, io.StringIO]:
    clock, stream = Clock(), io.StringIO()
    handler = StormHandler(clock)
    handler.setStream(stream)
    monkeypatch.setattr(handler, "_start_timer", lambda: None)
    return handler, clock, stream


def logger(handler: logging.Handler) -> logging.Logger:
    log = logging.Logger("test")
    log.addHandler(handler)
    return log


# ------------------------------------------------------------------------------------ storms


def test_a_storm_is_a_few_lines_and_a_count(storm: Any) -> None:
    handler, clock, stream = storm
    log = logger(handler)

    def fail(number: int) -> None:
        log.error("request %d failed", number)

    for number in range(1000):
        fail(number)
    assert len(stream.getvalue().splitlines()) == BURST
    log.error("another line of code is not its business")
    clock.now += WINDOW_SECONDS
    fail(1000)
    lines = stream.getvalue().splitlines()[BURST:]
    assert lines[1:] == ["995 more in 10 s like: request 999 failed", "request 1000 failed"]


def test_incidents_are_counted_by_their_kind(storm: Any) -> None:
    handler, clock, stream = storm
    log = logger(handler)
    for number in range(30):
        kind = "429" if number % 3 else "503"
        log.info("refused with %s", kind, extra={"incident": kind, "burst": 1})
        log.info("an ordinary line")
    clock.now += WINDOW_SECONDS
    handler.close()
    lines = stream.getvalue().splitlines()
    assert lines.count("an ordinary line") == 30
    assert sorted(line for line in lines if "ordinary" not in line) == [
        "19 more in 10 s like: refused with 429",
        "9 more in 10 s like: refused with 503",
        "refused with 429",
        "refused with 503",
    ]


def test_the_memory_of_storms_is_bounded(storm: Any) -> None:
    handler, _, _ = storm
    log = logger(handler)
    for number in range(5000):
        log.info("x", extra={"incident": number})
    assert len(handler._kinds) <= 500


def timer_of(handler: StormHandler) -> threading.Timer | None:
    """The timer of an open window; its end may be under way."""
    assert handler.lock is not None
    with handler.lock:
        return handler._timer


def test_a_count_is_written_though_nothing_else_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle_server.logs.WINDOW_SECONDS", 0.05)
    stream = io.StringIO()
    handler = StormHandler()
    handler.setStream(stream)
    log = logger(handler)
    for _ in range(20):
        log.warning("again")
    while timer := timer_of(handler):  # another one, if all this took longer than a window
        timer.join(10)
        assert not timer.is_alive()
    handler.close()
    lines = stream.getvalue().splitlines()
    counts = [int(line.split()[0]) for line in lines if line.endswith("more in 0.05 s like: again")]
    assert counts and sum(counts) + lines.count("again") == 20
    assert lines[:BURST] == ["again"] * BURST


# ------------------------------------------------------------------------------- forms, files


def test_a_line_of_json_has_everything(root: logging.RootLogger, capsys: Any) -> None:
    root.handlers.clear()  # pytest's
    start(LogSettings(format="json"), "server")
    token = request_id.set("id-1")
    try:
        raise ValueError("lone \ud800 and\nbreak")
    except ValueError:
        logging.getLogger("any.library").exception("it %s", "failed")
    finally:
        request_id.reset(token)
    warnings.simplefilter("always")
    warnings.warn("a warning of a library", stacklevel=1)
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert first["message"] == "it failed" and first["level"] == "ERROR"
    assert (first["process"], first["logger"], first["request_id"]) == (
        "server",
        "any.library",
        "id-1",
    )
    assert "ValueError: lone" in first["exception"] and first["pid"] > 0
    assert second["logger"] == "py.warnings" and "a warning of a library" in second["message"]
    assert "request_id" not in second and second["time"].startswith("20")


def test_libraries_write_in_the_same_form(
    root: logging.RootLogger, tmp_path: Path, capsys: Any
) -> None:
    """transformers, torch and huggingface_hub set up terminals of their own when they are imported."""
    root.handlers.clear()  # pytest's
    start(LogSettings(), "server")
    library = logging.getLogger("a_library")
    library.addHandler(logging.StreamHandler())
    file = logging.FileHandler(tmp_path / "log")
    library.addHandler(file)
    library.propagate = False
    library.warning("careful")
    file.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("WARNING [server] a_library: careful")
    assert (tmp_path / "log").read_text() == "careful\n"


def test_a_program_with_a_log_of_its_own_keeps_it(root: logging.RootLogger) -> None:
    mine = logging.NullHandler()
    root.handlers[:] = [mine]
    start(LogSettings(format="json"), "server")
    assert root.handlers == [mine]


CONFIG = {
    "version": 1,
    "formatters": {"mine": {"format": "MINE %(role)s %(levelname)s %(message)s"}},
    "handlers": {"err": {"class": "logging.StreamHandler", "formatter": "mine"}},
    "root": {"level": "WARNING", "handlers": ["err"]},
}


def test_a_file_decides(root: logging.RootLogger, tmp_path: Path, capsys: Any) -> None:
    for suffix in ("json", "yaml"):
        path = tmp_path / f"log.{suffix}"
        path.write_text(json.dumps(CONFIG))  # JSON is YAML, too
        start(LogSettings(file=str(path)), "server")
        logging.getLogger("treadle.x").warning("hello")
        logging.getLogger("treadle.x").info("not at this level")
        assert capsys.readouterr().err == "MINE server WARNING hello\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("{", "cannot be read"),
        ("[]", "holds list"),
        ('{"version": 7}', "cannot be used"),
        ('{"version": 1, "root": {"handlers": ["x"]}}', "cannot be used"),
        ('{"version": 1, "handlers": {"x": {"class": "no.such.Class"}}}', "no.such"),
    ],
)
def test_a_file_that_cannot_be_used(
    root: logging.RootLogger, tmp_path: Path, text: str | None, message: str
) -> None:
    path = tmp_path / "log.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        start(LogSettings(file=str(path)), "server")
    assert "log_config_file" in str(error.value)


@pytest.mark.parametrize("form", ["text", "json", "file"])
def test_children_log_in_the_same_form(form: str, tmp_path: Path) -> None:
    """Every process of a server is started by ``spawn``, whatever it does."""
    path = tmp_path / "log.json"
    path.write_text(json.dumps(CONFIG))
    settings = {"file": str(path)} if form == "file" else {"format": form}
    parent = (
        "import sys; from treadle_server.logs import start; from treadle.processes.spawn import spawn; "
        f"start({settings!r}, 'server'); sys.path.insert(0, {str(tmp_path)!r}); "
        "import logging; logging.getLogger('treadle').warning('parent'); spawn('kind.child:main')[0].wait()"
    )
    (tmp_path / "kind").mkdir()
    (tmp_path / "kind/child.py").write_text(
        "import logging, warnings\n"
        "def main(fd):\n"
        "    logging.getLogger('a.library').warning('child')\n"
        "    warnings.warn('careful')\n"
    )
    command = [sys.executable, "-c", parent]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    own, child, *warned = done.stderr.splitlines()
    if form == "json":
        assert (json.loads(own)["process"], json.loads(child)["process"]) == ("server", "kind")
        assert "careful" in json.loads(warned[0])["message"]
    elif form == "text":
        assert own.endswith("WARNING [server] treadle: parent")
        assert child.endswith("WARNING [kind] a.library: child")
        assert "WARNING [kind] py.warnings: " in warned[0] and "careful" in warned[0]
    else:
        assert (own, child) == ("MINE server WARNING parent", "MINE kind WARNING child")
        assert warned[0].startswith("MINE kind WARNING")


def test_a_program_without_our_log_has_children_that_log(root: logging.RootLogger) -> None:
    assert LogSetup.current().start == "treadle.processes.logs:start_logging"
    child, sock = spawn("logging:error")
    sock.close()
    assert child.wait(20) == 0


# ---------------------------------------------------------------------------- of a server


def records(caplog: pytest.LogCaptureFixture, level: int = logging.INFO) -> list[str]:
    ours = ("treadle.server", "treadle.access", "treadle.stats")
    return [r.getMessage() for r in caplog.records if r.name in ours and r.levelno >= level]


async def test_each_refusal_is_a_line_without_what_the_client_wrote(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "treadle")

    def full(engine: ScriptedEngine, step: int) -> None:
        raise QueueFullError("7 requests are waiting")

    bodies: list[dict[str, Any]] = [
        {"prompt": SECRET, "n": 0},
        {"prompt": "a", "stop": [SECRET, 3]},
        {"prompt": "a", "model": SECRET},
        {"prompt": "a", "response_format": {"type": SECRET}},
        {"prompt": {SECRET: SECRET}},
        {"prompt": "a", SECRET: 1, "logit_bias": {SECRET: 1}},
        {"prompt": SECRET * 200},
    ]
    async with serving(ScriptedEngine(before=full), api_key=[KEY]) as server:
        server.client.headers["authorization"] = f"Bearer {KEY}"
        for body in bodies:
            assert 400 <= (await server.post("/v1/completions", body)).status_code < 500, body
        number = len(records(caplog))
        assert number == len(bodies), records(caplog)
        await server.chat()
        headers = {"authorization": f"Bearer {KEY}{SECRET}"}
        await server.client.get(f"/v1/models?key={KEY}", headers=headers)
    refused = records(caplog)
    assert all(
        line.startswith("refused POST /v1/completions of 127.0.0.1: 4") for line in refused[:7]
    )
    assert "/v1/chat/completions" in refused[7] and "429 queue_full: 7 requests" in refused[7]
    assert "401 invalid_api_key" in refused[8]
    assert SECRET not in caplog.text and KEY not in caplog.text


async def test_what_clients_write_is_logged_when_asked(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "treadle")
    async with serving(enable_log_requests=True, max_log_len=5) as server:
        await server.complete(prompt="the secret", temperature=0.25)
        await server.complete(prompt="the secret", stream=True, max_tokens=3)
        await server.chat(n=0)
    whole, stream, refused = records(caplog)
    assert "'the s'" in whole and "ids None" in whole and "temperature=0.25" in whole
    assert "cmpl-" in stream and "max_tokens=3" in stream
    assert "n is 0" in refused or "`n`" in refused or " n " in refused, refused


async def test_a_line_for_each_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "treadle")
    async with serving(access_log=True) as server:
        await server.client.get("/v1/models?secret=1")
        events((await server.chat(stream=True)).text)
    models, chat = records(caplog)
    assert models.startswith('127.0.0.1 "GET /v1/models" 200 in ')
    assert chat.startswith('127.0.0.1 "POST /v1/chat/completions" 200 in ')


async def test_ids_of_requests_are_in_lines_and_in_the_engine(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(request_id.get())

    handler = Handler()
    log = logging.getLogger("treadle.server")
    log.addHandler(handler)
    caplog.set_level(logging.INFO, "treadle")

    def fail(engine: ScriptedEngine, step: int) -> None:
        raise ValueError("unexpected")

    engine = ScriptedEngine(before=fail)
    try:
        async with serving(engine) as server:
            sent = {"x-request-id": "mine-1"}
            for stream in (False, True):
                body = {"prompt": "a", "stream": stream}
                answer = await server.post("/v1/completions", body, headers=sent)
                assert answer.headers["x-request-id"] == "mine-1"
            long = await server.post(
                "/v1/completions", {"prompt": "a"}, headers={"x-request-id": "x" * 128}
            )
            forged = await server.client.get("/v1/models/x", headers={"x-request-id": "a b"})
    finally:
        log.removeHandler(handler)
    assert all(id is not None and id.endswith(" mine-1") for id in engine.ids[:2])
    assert long.status_code == 500 and all(len(id or "") <= 128 for id in engine.ids)
    assert len(forged.headers["x-request-id"]) == 32
    assert set(seen) == {"mine-1", "x" * 128, forged.headers["x-request-id"]}


async def test_clients_that_leave_are_one_line(storm: Any) -> None:
    handler, clock, stream = storm
    handler.setFormatter(TextFormatter())
    log = logging.getLogger("treadle.server")
    log.addHandler(handler)
    level = log.level
    log.setLevel(logging.INFO)
    engine = ScriptedEngine(pause=30)
    try:
        async with serving(engine) as server:
            writers = []
            for _ in range(40):
                _, writer = await asyncio.open_connection("127.0.0.1", server.port)
                body = b'{"prompt": "a", "stream": true}'
                head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
                writer.write(head % len(body) + body)
                writers.append(writer)
            await until(lambda: engine.running == 40)
            for writer in writers:
                writer.close()
            await until(lambda: not server.context.metrics.active)
            clock.now += WINDOW_SECONDS
            handler.write_counts()
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    left = [line for line in stream.getvalue().splitlines() if " left after " in line]
    assert len(left) == 2 and "39 more in 10 s like: the client of POST /v1/completions" in left[1]


# ------------------------------------------------------------------------------------ stats


def test_stats_are_a_line_while_there_is_work(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "treadle.stats")
    clock = Clock()
    stats_log = StatsLog(clock)
    stats = EngineStats(num_pages=8)
    for second in range(41):
        clock.now = float(second)
        if second == 15:
            stats = EngineStats(
                num_pages=8,
                num_used_pages=2,
                num_running=3,
                num_waiting=1,
                step_tokens=155,
                generation_tokens=55,
                prefix_cache_queries=100,
                prefix_cache_hits=25,
            )
        if second == 23:
            stats = EngineStats(
                num_pages=8,
                step_tokens=170,
                generation_tokens=70,
                prefix_cache_queries=100,
                prefix_cache_hits=25,
            )
        stats_log.update(stats)
    assert records(caplog) == [
        "prompt 10.0 tok/s, output 5.5 tok/s, running 3, waiting 1, KV cache 25.0 %, prefix cache "
        "hits 25.0 %",
        "prompt 0.0 tok/s, output 1.5 tok/s, running 0, waiting 0, KV cache 0.0 %, prefix cache hits –",
    ]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_a_formatter_may_be_named_in_a_file() -> None:
    config = {"formatters": {"x": {"()": "treadle_server.logs.JSONFormatter"}}}
    config |= {"handlers": {"h": {"()": "treadle_server.logs.StormHandler", "formatter": "x"}}}
    configurator = logging.config.DictConfigurator({"version": 1, **config})
    formatter = configurator.configure_formatter(configurator.config["formatters"]["x"])
    assert isinstance(formatter, JSONFormatter)
