"""The log of a server and of all its processes: one form for every line, text or JSON.

The children of the server call ``start`` with the same settings (``treadle.processes.spawn``). Nothing
in a line is a secret: keys never, and what a client wrote only with ``--enable-log-requests``.
"""

from __future__ import annotations

import json
import logging
import logging.config
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import msgspec

from treadle.errors import ConfigError
from treadle.processes.logs import LogSetup, RecordFormatter

__all__ = (
    "SERVER",
    "JSONFormatter",
    "LogSettings",
    "StormHandler",
    "TextFormatter",
    "request_id",
    "start",
    "unenforced",
)

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""The ``x-request-id`` of the request that is being answered."""
unenforced: ContextVar[dict[str, None] | None] = ContextVar("unenforced", default=None)
"""What the outputs of the request need not obey of its constraint; the gateway makes one for each."""

SERVER = "server"
"""The name of the process that serves, in its lines."""
BURST = 5
WINDOW_SECONDS = 10.0
MAX_KINDS = 500
LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


class LogSettings(msgspec.Struct, frozen=True):
    """What the options of the server say about its log."""

    level: str = "info"
    format: str = "text"
    file: str | None = None
    """A JSON or YAML file for ``logging.config.dictConfig``."""
    steps: str | None = None
    """The folder of ``LoadMonitor``, and of ``CallMonitor`` in child processes, if there is one."""


class TextFormatter(RecordFormatter):
    """``time LEVEL [process] logger: message``, and at the end the id of the request."""

    def __init__(self) -> None:
        layout = "%(asctime)s %(levelname)s [%(role)s] %(name)s: %(message)s"
        super().__init__(layout, defaults={"role": "-"})

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        id = getattr(record, "request_id", "")
        return f"{line} [{id}]" if id else line


class JSONFormatter(RecordFormatter):
    """One JSON object for each record."""

    def __init__(self) -> None:
        super().__init__("%(message)s")

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03}",
            "level": record.levelname,
            "process": getattr(record, "role", ""),
            "pid": record.process,
            "logger": record.name,
        }
        record.message = record.getMessage()
        fields["message"] = self.formatMessage(record)
        if id := getattr(record, "request_id", ""):
            fields["request_id"] = id
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


class LibraryLogger(logging.Logger):
    """A logger whose lines go where all others go, whatever its library sets up for the terminal."""

    @property
    def propagate(self) -> bool:
        return True

    @propagate.setter
    def propagate(self, value: bool) -> None:
        """Keep it: transformers and torch switch it off when they are imported."""

    def addHandler(self, handler: logging.Handler) -> None:
        is_terminal = isinstance(handler, logging.StreamHandler)
        if isinstance(handler, logging.FileHandler) or not is_terminal:
            super().addHandler(handler)


class StormHandler(logging.StreamHandler[Any]):
    """Writes to standard error, and makes one line with a count of what repeats too often.

    Warnings and errors of one line of code, and of one ``incident`` if the record names one, are
    written ``BURST`` times in ``WINDOW_SECONDS`` (or as the ``burst`` of the record says). How many
    more there were is written at the end of that time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._kinds: dict[tuple[Any, ...], _Kind] = {}
        self._timer: threading.Timer | None = None

    def emit(self, record: logging.LogRecord) -> None:
        incident = getattr(record, "incident", None)
        if record.levelno < logging.WARNING and incident is None:
            super().emit(record)
            return
        self.write_counts()
        key = (record.pathname, record.lineno, incident)
        kind = self._kinds.get(key)
        if kind is None:
            if len(self._kinds) >= MAX_KINDS:
                self._kinds.pop(next(iter(self._kinds)))
            kind = self._kinds[key] = _Kind(self._clock())
        kind.count += 1
        if kind.count <= getattr(record, "burst", BURST):
            super().emit(record if kind.count == 1 else _without_traceback(record))
        else:
            kind.suppressed, kind.last = kind.suppressed + 1, record
            self._start_timer()

    def write_counts(self, *, all: bool = False) -> None:
        """Write the count of every storm whose time is over, or of ``all``."""
        now = self._clock()
        ended = [k for k, kind in self._kinds.items() if all or now - kind.since >= WINDOW_SECONDS]
        for key in ended:
            kind = self._kinds.pop(key)
            if kind.last is not None:
                super().emit(_count_of(kind.last, kind.suppressed))

    def close(self) -> None:
        self.acquire()
        try:
            if self._timer is not None:
                self._timer.cancel()
            self.write_counts(all=True)
        finally:
            self.release()
        super().close()

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = threading.Timer(WINDOW_SECONDS, self._end_window)
            self._timer.daemon = True
            self._timer.start()

    def _end_window(self) -> None:
        self.acquire()
        try:
            self._timer = None
            self.write_counts()
            if any(kind.last is not None for kind in self._kinds.values()):
                self._start_timer()
        finally:
            self.release()


class _Kind:
    """What was logged of one kind since a time."""

    __slots__ = ("count", "last", "since", "suppressed")

    def __init__(self, since: float) -> None:
        self.since = since
        self.count = self.suppressed = 0
        self.last: logging.LogRecord | None = None


def _without_traceback(record: logging.LogRecord) -> logging.LogRecord:
    """Return a record that repeats one with a traceback: the first shows where it comes from."""
    if not record.exc_info:
        return record
    repeated = logging.makeLogRecord(record.__dict__)
    repeated.exc_info = repeated.exc_text = None
    return repeated


def _count_of(record: logging.LogRecord, count: int) -> logging.LogRecord:
    """Return a record that stands for ``count`` more like ``record``."""
    summary = logging.makeLogRecord({**record.__dict__, "request_id": ""})
    summary.created = time.time()
    summary.msecs = summary.created % 1 * 1000
    summary.msg, summary.args = (
        f"{count} more in {WINDOW_SECONDS:g} s like: %s",
        (record.getMessage(),),
    )
    summary.exc_info = summary.exc_text = None
    return summary


def start(settings: Any, process: str) -> None:
    """Log as ``settings`` (``LogSettings``, or its JSON) say, and let the children do so.

    ``process`` is the name of this process in its lines. Raises ``ConfigError`` for a file that
    cannot be read or used.
    """
    options = msgspec.convert(settings, LogSettings, from_attributes=True)
    config = _default(options) if options.file is None else _read(options.file)
    if options.file is None and logging.root.handlers:  # a program around the server has its own
        config = {}
    elif options.file is None:
        logging.setLoggerClass(LibraryLogger)
    create = logging.LogRecord

    def labelled(*arguments: Any, **named: Any) -> logging.LogRecord:
        record = create(*arguments, **named)
        record.role, record.request_id = process, request_id.get()
        return record

    logging.setLogRecordFactory(labelled)
    try:
        logging.config.dictConfig({"version": 1, "disable_existing_loggers": False, **config})
    except (ValueError, TypeError, AttributeError, ImportError, KeyError, OSError) as error:
        cause = f": {error.__cause__}" if error.__cause__ else ""
        raise ConfigError(
            f"log_config_file {options.file!r} cannot be used: {error}{cause}; it must be a "
            "configuration for Python's logging.config.dictConfig"
        ) from error
    logging.captureWarnings(True)
    log = logging.getLogger("treadle")
    for handler in [handler for handler in log.handlers if isinstance(handler, LogSetup)]:
        log.removeHandler(handler)
    log.addHandler(LogSetup("treadle_server.logs:start", msgspec.to_builtins(options)))
    if options.steps is not None:
        from treadle_server.call_monitor import CallMonitor
        from treadle_server.load_monitor import LoadMonitor

        LoadMonitor(Path(options.steps)).start()
        if process != SERVER:  # which is the one that asks the others
            CallMonitor(Path(options.steps)).start()


def _default(options: LogSettings) -> dict[str, Any]:
    formatter = JSONFormatter if options.format == "json" else TextFormatter
    return {
        "formatters": {"line": {"()": formatter}},
        "handlers": {"stderr": {"()": StormHandler, "formatter": "line"}},
        "root": {"level": LEVELS[options.level], "handlers": ["stderr"]},
    }


def _read(path: str) -> dict[str, Any]:
    """Return the mapping in a file, which is YAML if its name says so."""
    try:
        data = Path(path).read_bytes()
        is_yaml = path.endswith((".yaml", ".yml"))
        config = msgspec.yaml.decode(data) if is_yaml else msgspec.json.decode(data)
    except (OSError, msgspec.DecodeError, ImportError) as error:
        raise ConfigError(f"log_config_file {path!r} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(
            f"log_config_file {path!r} holds {type(config).__name__}; it must be an object for "
            "Python's logging.config.dictConfig"
        )
    return config
