"""A plugin that takes long while an engine starts is named, in programs and commands as in the server."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from treadle.api.kinds import STAT_LOGGERS
from treadle.config import from_options
from treadle.processes.logs import SlowStepNotice, steps
from treadle.text.assets import open_plugins

PLUGIN = """
import time
from pathlib import Path

from treadle.api import impl

TREADLE = {{"stat_loggers": ["slow"]}}


@impl
def treadle_stat_logger(name):
    return None


deadline = time.monotonic() + 60
while not Path({flag!r}).exists():
    if time.monotonic() > deadline:
        raise TimeoutError("nobody was told")
    time.sleep(0.005)
"""


def test_an_import_that_takes_long_is_named_while_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag, file = tmp_path / "told", tmp_path / "slow.py"
    file.write_text(PLUGIN.format(flag=str(flag)))
    messages: list[str] = []

    class Reader(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "slow.py" in record.getMessage():
                messages.append(record.getMessage())
                flag.touch()

    monkeypatch.setattr(SlowStepNotice, "seconds", 0.0)
    monkeypatch.setattr(steps, "handlers", [])
    monkeypatch.setattr(logging.getLogger("treadle.plugins"), "handlers", [Reader()])
    plugins = open_plugins(from_options(plugin_file=[str(file)]))
    assert str(file) in [entry.file for entry in plugins.loaded(STAT_LOGGERS)]
    assert messages[0].startswith("importing stat_loggers:slow from slow.py ")
    assert len(steps.handlers) == 1
    open_plugins(from_options())
    assert len(steps.handlers) == 1, "each engine adds another"
