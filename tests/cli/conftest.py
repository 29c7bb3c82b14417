"""Running the command as a user does: in this process where that is the same, else in another."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from treadle_cli.main import main


class CommandResult(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., CommandResult]


@pytest.fixture
def treadle(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Run:
    """``treadle(*arguments, stdin="")`` in this process, in an empty folder."""
    for variable in [v for v in os.environ if v.startswith("TREADLE_")]:
        monkeypatch.delenv(variable)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, stdin: str = "") -> CommandResult:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        captured = capsys.readouterr()
        return CommandResult(int(ended.value.code or 0), captured.out, captured.err)

    return run


def treadle_process(*arguments: str, **options: object) -> CommandResult:
    """``treadle`` in a new process."""
    process = subprocess.run(
        [sys.executable, "-m", "treadle_cli", *arguments], capture_output=True, text=True, **options
    )
    return CommandResult(process.returncode, process.stdout, process.stderr)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny random model with a byte-level tokenizer."""
    from treadle.testing.checkpoints import make_checkpoint

    return str(make_checkpoint(tmp_path_factory.mktemp("model"), tokenizer=True))
