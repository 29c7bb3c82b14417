"""The engine process ends with its parent, also where nothing looks at the socket."""

from __future__ import annotations

from pathlib import Path

import pytest

from treadle.config import from_options
from treadle.engine.ipc import StartEngine
from treadle.processes.framing import encode_frame
from treadle.processes.spawn import spawn

CHILD = """
import time
from treadle.engine import process

def hangs(config):
    print("hangs", flush=True)
    time.sleep(600)

def main(fd):
    process.EXIT_SECONDS = 0.0
    process.main(fd, hangs)
"""


def test_a_start_that_hangs_ends_with_the_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "engine_child.py").write_text(CHILD)
    monkeypatch.syspath_prepend(str(tmp_path))
    child, sock = spawn("engine_child:main")
    sock.sendall(encode_frame(StartEngine(from_options(model="m"))))
    while "hangs" not in capfd.readouterr().out:
        assert child.poll() is None
    sock.close()
    assert child.wait(30) == 1
