"""``treadle plugin bisect``: which of the installed distributions makes a command fail.

The command is run again and again, each time with other distributions switched off.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Sequence

from treadle.config import environment

__all__ = ("culprits", "succeeds")

POLL_SECONDS = 0.05
SWITCH = "TREADLE_DISABLED_PLUGINS"


def culprits(
    candidates: Sequence[str], works_without: Callable[[Collection[str]], bool]
) -> list[str]:
    """Return the fewest of ``candidates`` that must be switched off for the command to work.

    ``works_without`` runs it. Empty if it works with all of them, or fails without any. If two of
    them fail it together, one is found; if each of two fails it, both halves are needed and the rest
    of the search is over all that may be left out.
    """
    if works_without(()) or not works_without(candidates):
        return []
    suspects, innocent = list(candidates), 0
    size = len(suspects) // 2
    while size:
        half = suspects[innocent : innocent + size]
        rest = [name for name in suspects if name not in half]
        if half and works_without(rest):  # ``half`` can stay
            suspects = rest
        else:
            innocent += size
        if innocent >= len(suspects):
            size, innocent = size // 2, 0
    return suspects


def succeeds(
    command: Sequence[str], disabled: Collection[str], *, seconds: float, until: str = ""
) -> bool:
    """Run ``command`` without the ``disabled`` distributions; return whether it works.

    It works if it exits with 0 within ``seconds``, or as soon as it prints ``until``. It is ended
    in any case.
    """
    names = [*environment()["disable"], *disabled]
    deadline = time.monotonic() + seconds
    with (
        tempfile.TemporaryFile() as out,
        subprocess.Popen(
            ["env", f"{SWITCH}={','.join(names)}", *command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            process_group=0,
        ) as child,
    ):
        try:
            while time.monotonic() < deadline:
                status = child.poll()
                if until and until.encode() in os.pread(out.fileno(), 1 << 24, 0):
                    return True
                if status is not None:
                    return status == 0 and not until
                time.sleep(POLL_SECONDS)
            return False
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
