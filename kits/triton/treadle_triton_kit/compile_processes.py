"""Kernels that are compiled in processes of their own, into Triton's cache on disk.

Much of a compilation is Python, so that threads wait for each other. A process is forked before there is
anything to compile and before the device is used; it forks another for each thread that has something to
compile. None of them uses a device, or any file but its socket, and all of them end with the parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import hashlib
import importlib
import inspect
import json
import logging
import os
import signal
import socket
import threading
import traceback
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

__all__ = ("CompileProcesses",)

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
FORK_SECONDS = 15.0
"""A fork inherits locks. One that says nothing for so long waits for a lock of a thread that it has not."""
COMPILE_SECONDS = 120.0
"""Of the slowest kernel, on a busy host."""
CLOSE_SECONDS = 5.0
MAX_REQUEST_BYTES = 2**16


class CompileProcesses:
    """Compiles in a process for each thread that asks; after the first that hangs or ends, in none.

    Linux only: there a process has its parent's kernels, and ends with it.
    """

    def __init__(self) -> None:
        """Fork the process that waits. Raises ``OSError`` if it cannot be."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._compilers: dict[int, socket.socket] = {}
        self._lock = threading.Lock()
        with theirs, contextlib.ExitStack() as undo:
            undo.enter_context(self._control)
            self._pid = _fork(theirs.fileno(), _serve)
            undo.pop_all()

    def compile(self, triton_key: str, function: Any, *job: Any) -> bool:
        """Compile a kernel for this thread, unless it lies on disk. Return whether it was compiled.

        ``triton_key`` is the hash of Triton's files; ``function`` and ``job`` are what ``JITFunction``'s
        method ``_do_compile`` gets. Takes a limited time, and raises nothing. May be called by any thread.
        """
        try:
            module, name = function.fn.__module__, function.fn.__qualname__
            key, signature, device, constants, options, attrs, *_ = job
            _, _, target, backend, *_ = function.device_caches[device]
            source = function.ASTSource(function, signature, constants, attrs)
            if _find(module, name) is not function or _is_on_disk(source, backend, options):
                return False
            request = {
                "module": module,
                "name": name,
                "specialization": _specialization(
                    function, signature, constants, attrs, options, key, target
                ),
                "target": vars(target),
            }
            data = json.dumps(request).encode() + b"\n"
        except Exception as error:  # Triton's inner functions change, and constants are of any type
            log.debug("%r is compiled in this process", function, exc_info=error)
            return False
        try:
            compiler = self._compiler(module, triton_key)
            if compiler is None:
                return False
            compiler.sendall(data)
            answer = _receive(compiler, COMPILE_SECONDS)
        except OSError as error:
            if self._stop():
                log.warning("kernels are compiled in this process; another failed at it: %r", error)
            return False
        if answer != b"compiled":
            log.debug("%r was not compiled in a process: %s", function, answer.decode())
        return answer == b"compiled"

    def close(self) -> None:
        """End all processes and wait for it. No thread may be compiling."""
        self._stop()
        for compiler in self._compilers.values():
            compiler.close()

    def _stop(self) -> bool:
        """End all processes, whatever they do, and wait for it. Return whether there were any."""
        with self._lock:
            if self._control.fileno() < 0:
                return False
            for compiler in self._compilers.values():
                with contextlib.suppress(OSError):
                    compiler.shutdown(socket.SHUT_RDWR)  # its thread may be waiting
            with self._control:
                try:
                    self._control.shutdown(socket.SHUT_WR)
                    self._control.settimeout(CLOSE_SECONDS)
                    self._control.recv(1)  # ends when the process does, after those that it forked
                except OSError:
                    os.kill(self._pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):  # where nobody has to wait for children
                os.waitpid(self._pid, 0)
        return True

    def _compiler(self, module: str, triton_key: str) -> socket.socket | None:
        """Return the socket of this thread's process, which is forked now if there is none.

        Returns ``None`` after ``_stop``. Raises ``OSError`` if no process begins.
        """
        thread = threading.get_ident()
        with self._lock:
            if self._control.fileno() < 0:
                return None
            if thread in self._compilers:
                return self._compilers[thread]
            mine, theirs = socket.socketpair()
            self._compilers[thread] = mine
            request = json.dumps([module, triton_key]).encode()
            with theirs:
                self._control.settimeout(FORK_SECONDS)
                socket.send_fds(self._control, [request], [theirs.fileno()])
        _receive(mine, FORK_SECONDS)
        return mine


def _fork(fd: int, serve: Callable[[int], None]) -> int:
    """Run ``serve(fd)`` in a fork that has no other file, and return its id."""
    parent, prctl = os.getpid(), ctypes.CDLL(None).prctl
    with warnings.catch_warnings():
        # Python's warning of locks that other threads hold. All waits are limited for their sake.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    try:
        # Nobody asks whether the parent ended before this but getppid.
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == parent:
            _detach(fd)
            with contextlib.suppress(ConnectionError):  # the parent is about to be gone
                serve(fd)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _detach(fd: int) -> None:
    """Detach from what the parent has: its signals, its garbage, its terminal, its files but ``fd``.

    Something else lies in the place of each file, so that none of those opened later gets its number.
    """
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    gc.freeze()  # nothing of it is finalized here
    os.setpgid(0, 0)
    nothing = os.open(os.devnull, os.O_RDWR)
    for entry in os.listdir("/proc/self/fd"):
        if int(entry) not in (1, 2, fd, nothing):
            os.dup2(nothing, int(entry), inheritable=False)


def _serve(fd: int) -> None:
    """Fork a process for each request, until the parent shuts its socket down; then end them all."""
    children = []
    with socket.socket(fileno=fd) as control:
        while True:
            message, fds, _, _ = socket.recv_fds(control, MAX_REQUEST_BYTES, 1)
            if not fds:
                break
            module, key = json.loads(message)
            _prepare(module, key)
            children.append(_fork(fds[0], _compile_requests))
            os.close(fds[0])
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _prepare(module: str, key: str) -> None:
    """Do once what each process would do: import a module, and hash Triton's files."""
    from triton.runtime import cache

    if hasattr(cache, "triton_key"):
        cache.triton_key = lambda: key
    with contextlib.suppress(Exception):  # the request fails in the same way
        importlib.import_module(module)


def _compile_requests(fd: int) -> None:
    with socket.socket(fileno=fd) as sock, sock.makefile("rb") as requests:
        sock.sendall(b"begun\n")
        for request in requests:
            try:
                _compile(**json.loads(request))
                answer = "compiled"
            except Exception as error:
                answer = f"{type(error).__name__}: {error}".replace("\n", " ")
            sock.sendall(answer.encode(errors="replace") + b"\n")


def _compile(module: str, name: str, specialization: str, target: dict[str, Any]) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    driver.set_active(_KnownTarget(GPUTarget(**target)))
    _find(module, name).preload(specialization)


class _KnownTarget:
    """What Triton asks for the device, in place of a driver."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_device(self) -> int:
        """Return a number that no device has, so that nothing is found which was made for one."""
        return -1

    def get_current_target(self) -> Any:
        return self._target

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a process that compiles has no device, and so no {name}")


def _find(module: str, name: str) -> Any:
    """Return the ``JITFunction`` of a name in a module, below what wraps it."""
    from triton.runtime.jit import JITFunction

    function = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    while not isinstance(function, JITFunction):
        function = function.fn
    return function


def _is_on_disk(source: Any, backend: Any, options: Any) -> bool:
    """Return whether Triton finds a kernel in its cache, by the name that ``triton.compile`` gives it."""
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.runtime.cache import get_cache_key, get_cache_manager

    key = get_cache_key(source, backend, options, get_cache_invalidating_env_vars())
    name = f"{source.name[:150]}.json"
    group = get_cache_manager(hashlib.sha256(key.encode()).hexdigest()).get_group(name)
    return name in (group or {})


def _specialization(function: Any, *job: Any) -> str:
    """Return what ``JITFunction.preload`` reads. Raises ``TypeError`` for constants that JSON has not."""
    from triton.runtime.jit import get_full_name, serialize_specialization_data

    parameters = inspect.signature(serialize_specialization_data).parameters
    arguments = (get_full_name(function.fn), *job)
    # Triton 3.6 has no target.
    data: str = serialize_specialization_data(*arguments[: len(parameters)])
    return data


def _receive(sock: socket.socket, seconds: float) -> bytes:
    """Return a line, without its end. Raises ``OSError`` if it does not come within ``seconds``."""
    sock.settimeout(seconds)
    line = bytearray()
    while not line.endswith(b"\n"):
        if not (piece := sock.recv(4096)):
            raise ConnectionResetError("the process has ended")
        line += piece
    return bytes(line[:-1])
