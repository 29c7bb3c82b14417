"""Log records as lines that nobody outside of the program can forge: messages quote clients."""

from __future__ import annotations

import logging
import re

__all__ = ("LogSetup", "RecordFormatter", "start_logging", "steps")

MAX_MESSAGE = 4096
"""Characters of a message that are logged."""
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")

steps = logging.Logger("treadle.plugins.steps", logging.DEBUG)
"""Says which code of a plugin begins to run, and nothing when it has ended: for who watches a start."""


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
