"""Run a module of treadle in a new process with a time limit."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from typing import TypeVar

import msgspec

__all__ = ("ChildError", "ask")

T = TypeVar("T")
BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {module} import main; main()"
TAIL = 3


class ChildError(Exception):
    """The child returned no answer. ``hung``: it exceeded the time limit; otherwise it died."""

    def __init__(self, text: str, *, hung: bool) -> None:
        super().__init__(text)
        self.hung = hung


def ask(module: str, request: msgspec.Struct, answer: type[T], seconds: float) -> T:
    """Run ``main`` of ``module`` with ``request`` on standard input and return its answer.

    Raises ``ChildError`` if there is none within ``seconds``.
    """
    command = [sys.executable, "-P", "-c", BOOT.format(module=module), json.dumps(sys.path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, process_group=0) as child:
        try:
            out, err = child.communicate(msgspec.json.encode(request), timeout=seconds)
        except subprocess.TimeoutExpired:
            raise ChildError(f"no end after {seconds:g} s", hung=True) from None
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)  # also the children of the plugin
    try:
        return msgspec.json.decode(out, type=answer)
    except msgspec.DecodeError:
        raise ChildError(_end(child.returncode, err), hung=False) from None


def _end(status: int, err: bytes) -> str:
    lines = [line for line in err.decode(errors="replace").splitlines() if line.strip()]
    reason = f"exit status {status}"
    if status < 0:
        with contextlib.suppress(ValueError):
            reason = signal.Signals(-status).name
    return f"{reason}: {' / '.join(lines[-TAIL:])}" if lines else reason
