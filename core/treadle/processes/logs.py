"""Log records as lines that nobody outside of the program can forge: messages quote clients."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Sequence

__all__ = ("LogSetup", "RecordFormatter", "SlowStepNotice", "start_logging", "steps")

log = logging.getLogger("treadle.plugins")

MAX_MESSAGE = 4096
"""Characters of a message that are logged."""
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")

steps = logging.Logger("treadle.plugins.steps", logging.DEBUG)
"""Says which code of a plugin begins to run, and nothing when it has ended: for who watches a start."""


class SlowStepNotice(logging.Handler):
    """A handler of ``steps`` that warns of the code of a plugin that runs for long: it may hang."""

    seconds = 5.0  # imports read a disk that may be cold

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()  # a hook that each request calls has a watchdog
        self._timers: dict[int, Sequence[threading.Timer]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        text, thread = record.getMessage(), record.thread or 0
        self.cancel(thread)
        if text and text not in self.seen:
            self.seen.add(text)
            self._timers[thread] = self.timers(text)
            for timer in self._timers[thread]:
                timer.daemon = True
                timer.start()

    def timers(self, text: str) -> Sequence[threading.Timer]:
        """Return what happens while the step that ``text`` names goes on."""
        words = ("%s takes more than %g s", text, self.seconds)
        return [threading.Timer(self.seconds, log.warning, words)]

    def cancel(self, thread: int) -> None:
        """Let nothing happen any more for the step of a thread."""
        for timer in self._timers.pop(thread, ()):
            timer.cancel()


class RecordFormatter(logging.Formatter):
    """Control characters are escaped, and a line that continues a record is indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        if len(record.message) > MAX_MESSAGE:
            size = len(record.message)
            record.message = f"{record.message[:MAX_MESSAGE]} … ({size} characters)"
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)  # with the traceback, whose last line quotes as well
        return CONTROLS.sub(lambda char: repr(char[0])[1:-1], text).replace("\n", "\n  ")


class LogSetup(logging.NullHandler):
    """How child processes log: they call ``start`` (``module:function``) with ``settings``, which
    are JSON, and a name. The logger ``treadle`` keeps it as a handler."""

    def __init__(self, start: str, settings: object) -> None:
        super().__init__()
        self.start, self.settings = start, settings

    @staticmethod
    def current() -> LogSetup:
        log = logging.getLogger("treadle")
        setups = (handler for handler in log.handlers if isinstance(handler, LogSetup))
        return next(setups, LogSetup(f"{__name__}:start_logging", log.getEffectiveLevel()))


def start_logging(level: int, process: str) -> None:
    """Write what this process logs to its standard error, unless that was set up before."""
    handler = logging.StreamHandler()
    layout = f"%(asctime)s %(levelname)s [{process}] %(name)s: %(message)s"
    handler.setFormatter(RecordFormatter(layout))
    logging.basicConfig(level=level, handlers=[handler])
    steps.addHandler(SlowStepNotice())
