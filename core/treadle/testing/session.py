"""A pytest plugin for ``treadle plugin test``: what the code under test does to the process of its tests.

``-p treadle.testing.session``. When the tests have ended, it writes a line into the file ``session``
of the root folder: a process that has ended without it was ended by the plugin. The line names the
threads that would keep a process alive; the process ends in spite of them.
"""

from __future__ import annotations

import os
import sys
import threading

import pytest

__all__: tuple[str, ...] = ()


def leftover_threads() -> list[str]:
    """Return the names of the threads for which an interpreter waits before it exits."""
    return [
        thread.name
        for thread in threading.enumerate()
        if not thread.daemon and thread is not threading.main_thread()
    ]


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    names = leftover_threads()
    (config.rootpath / "session").write_text(", ".join(names), encoding="utf-8")
    if names:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(pytest.ExitCode.TESTS_FAILED)
