"""Kernels that are compiled all at once, before anybody waits for one of them.

Triton compiles a kernel when it is first launched, one after the other. So what a start is going to launch
is launched in vain first: each new kernel goes to a thread, and nothing runs on the device. The thread reads
the kernel from disk; one that is not there is compiled by a process first (``CompileProcesses``).
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from typing import Any

from treadle_triton_kit.compile_processes import CompileProcesses
from treadle_triton_kit.support import is_triton_installed

__all__ = ("CompileAhead", "is_collecting")

log = logging.getLogger(__name__)

MAX_THREADS = 16
MAX_PARSES = 8
"""How often a kernel is parsed. Python before 3.11.5 counts how deep all threads are that parse as if they were one, and
raises ``SystemError`` then (https://github.com/python/cpython/issues/106905)."""


class CompileAhead:
    """Between ``open`` and ``close``, each kernel is compiled once, in a thread or by who launches it."""

    def __init__(self) -> None:
        self.compiled = 0
        """How many kernels were compiled; those that were read from disk do not count."""
        self._collector: int | None = None  # the thread that launches in vain
        self._undo: list[Callable[[], None]] = []
        self._pool: ThreadPoolExecutor | None = None
        self._processes: CompileProcesses | None = None
        self._submitted: list[Future[None]] = []

    def open(self) -> None:
        """Take the place of Triton's compiler. Without Triton, nothing happens.

        It forks, and so is best called before there is a context of a device.
        """
        if not is_triton_installed():
            return
        from triton import knobs
        from triton.runtime import cache, driver
        from triton.runtime.autotuner import Autotuner
        from triton.runtime.jit import JITFunction

        compile_now, tune = getattr(JITFunction, "_do_compile", None), Autotuner.run
        if compile_now is None:
            log.debug("this release of Triton compiles kernels one after the other")
            return
        self._processes = _processes()
        threads = min(len(os.sched_getaffinity(0)), MAX_THREADS)
        self._pool = pool = ThreadPoolExecutor(threads, "treadle-compile")
        # A hash of Triton's files, a part of every kernel's name on disk, which each thread would compute.
        hashed = pool.submit(getattr(cache, "triton_key", int))
        listener = knobs.compilation.listener

        def do_compile(
            function: Any, key: Any, signature: Any, device: Any, *args: Any, **kwargs: Any
        ) -> Any:
            if self._pool is None or not self.is_collecting:
                job = (function, key, signature, device, *args)
                return _parsed_again(compile_now, *job, **kwargs)  # threads may parse meanwhile
            kernels = function.device_caches[device][0]
            future: Future[Any] = Future()
            pending = kernels[key] = PendingKernel(self, future)

            def compile_and_load() -> None:
                try:
                    triton_key = hashed.result()
                    driver.active.set_current_device(device)
                    job = (function, key, signature, device, *args)
                    if self._processes is not None and self._processes.compile(triton_key, *job):
                        self.compiled += 1
                    kernel = _parsed_again(compile_now, *job, **kwargs)
                    kernels[key] = pending
                    _ = kernel.run  # gcc compiles what launches it, and the device loads it
                    kernels[key] = kernel
                    future.set_result(kernel)
                except Exception as error:  # raised by who launches the kernel in earnest
                    future.set_exception(error)

            self._submitted.append(self._pool.submit(compile_and_load))
            return pending

        def run(autotuner: Any, *args: Any, **options: Any) -> Any:
            # One that measures nothing would choose anything.
            return None if self.is_collecting else tune(autotuner, *args, **options)

        def on_compilation(*, cache_hit: bool, **facts: Any) -> None:
            self.compiled += not cache_hit
            if listener is not None:
                listener(cache_hit=cache_hit, **facts)

        do_compile.ahead = self  # type: ignore[attr-defined]
        for owner, name, value in (
            (JITFunction, "_do_compile", do_compile),
            (Autotuner, "run", run),
            (knobs.compilation, "listener", on_compilation),
        ):
            self._replace(owner, name, value)

    def wait(self) -> None:
        """Wait for what threads compile and load.

        The device may have to be idle for a kernel to be loaded. So nothing may be, while kernels run
        there that wait for other devices: each rank's driver would wait for what another is to launch.
        """
        wait(self._submitted)
        self._submitted.clear()

    def close(self) -> None:
        """Wait for what threads compile, and let Triton compile as before."""
        self._collector = None
        while self._undo:
            self._undo.pop()()
        if self._pool is not None:
            self._pool.shutdown()
        if self._processes is not None:
            self._processes.close()

    @property
    def is_collecting(self) -> bool:
        """Whether what this thread launches is compiled and does not run."""
        return self._collector == threading.get_ident()

    @contextmanager
    def collecting(self) -> Iterator[bool]:
        """Let this thread launch in vain; yield whether it may. Results are what lay in their memory.

        A kernel that was compiled before runs nevertheless.
        """
        if self._pool is None:
            yield False
            return
        self._collector = threading.get_ident()
        try:
            yield True
        except Exception as error:  # who launches in earnest hears of it
            log.debug("not all could be compiled ahead", exc_info=error)
        finally:
            self._collector = None

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        before = getattr(owner, name)

        def undo() -> None:
            if getattr(owner, name) is value:  # else it has been replaced again
                setattr(owner, name, before)

        setattr(owner, name, value)
        self._undo.append(undo)


def _parsed_again(compile_now: Callable[..., Any], *job: Any, **kwargs: Any) -> Any:
    """Return what it returns, also if other threads disturb Python's parser."""
    for _ in range(MAX_PARSES - 1):
        with suppress(SystemError):
            return compile_now(*job, **kwargs)
    return compile_now(*job, **kwargs)


class PendingKernel:
    """What Triton finds in the place of a kernel that a thread compiles.

    It launches nothing while kernels are collected; else it is the kernel, once that is compiled.
    """

    def __init__(self, ahead: CompileAhead, future: Future[Any]) -> None:
        self._ahead, self._future = ahead, future

    def result(self) -> Any:
        """Return what is to be launched; releases of Triton with kernels of this kind ask for it."""
        return self if self._ahead.is_collecting else self._future.result()

    def __getattr__(self, name: str) -> Any:
        if not self._ahead.is_collecting:
            return getattr(self._future.result(), name)
        return _launch_nothing if name in ("run", "launch_metadata") else None


def _processes() -> CompileProcesses | None:
    try:
        return CompileProcesses()
    except (OSError, AttributeError) as error:  # no memory, or another system than Linux
        log.debug("kernels are compiled in threads", exc_info=error)
        return None


def _launch_nothing(*args: object) -> None:
    pass


def is_collecting() -> bool:
    """Return whether what this thread launches is compiled and does not run."""
    module = sys.modules.get("triton.runtime.jit")
    compiler = getattr(getattr(module, "JITFunction", None), "_do_compile", None)
    ahead = getattr(compiler, "ahead", None)
    return ahead is not None and ahead.is_collecting
