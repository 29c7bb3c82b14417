"""What a client writes stays inside of the record that quotes it, however it came into the message."""

from __future__ import annotations

import io
import logging
import random
from pathlib import Path

import pytest

from treadle.processes.logs import MAX_MESSAGE, RecordFormatter, start_logging

ROOT = Path(__file__).parents[2]
FORGED = "ERROR forged: the disk is on fire"
BREAKS = ("\n", "\r", "\r\n", "\x0b", "\x0c", "\x1b[2J", "\x85", "\u2028", "\x00", "\ud800", "\n\n")


def logged(*, text: str, in_error: bool) -> list[str]:
    """The lines of three records, of which the second quotes ``text``."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(RecordFormatter("%(levelname)s %(name)s: %(message)s"))
    log = logging.Logger("test")
    log.addHandler(handler)
    log.info("before")
    if in_error:
        try:
            raise ValueError(text)
        except ValueError:
            log.exception("a plugin failed")
    else:
        log.error("the model %s does not exist", text)
    log.info("after")
    written = stream.getvalue()
    written.encode()  # a log is a file of UTF-8
    return written.splitlines()


@pytest.mark.parametrize("in_error", [False, True])
def test_no_client_writes_lines_of_the_log(in_error: bool, fault_seed: int) -> None:
    draw = random.Random(fault_seed)
    for _ in range(50):
        parts = [draw.choice(BREAKS) + draw.choice((FORGED, "", "x")) for _ in range(4)]
        lines = logged(text="".join(parts), in_error=in_error)
        records = [line for line in lines if not line.startswith("  ")]
        assert len(records) == 3, lines
        assert not any(line.startswith(FORGED) for line in lines)
        assert all(line.isprintable() for line in lines)


def test_a_message_has_a_length() -> None:
    lines = logged(text="x" * 1_000_000, in_error=False)
    assert len(lines) == 3 and len(lines[1]) < MAX_MESSAGE + 100
    assert lines[1].endswith("characters)")


def test_every_process_logs_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "root", logging.RootLogger(logging.WARNING))
    start_logging("INFO", "%(message)s")
    (handler,) = logging.root.handlers
    assert isinstance(handler.formatter, RecordFormatter)
    folders = ("core", "server", "cli", "kits", "plugins")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    found = [path.name for path in files if "basicConfig(" in path.read_text()]
    assert found == ["logs.py"]
