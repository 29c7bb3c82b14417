"""A Python that has imported torch, transformers and litestar already, for tests that run many programs.

    python preloaded.py serve FD            forks a process for each program, until its input ends
    python preloaded.py run SOCKET [-P] -c CODE [ARGUMENT …]
    python preloaded.py run SOCKET [-P] -m MODULE [ARGUMENT …]

``run`` stands for the ``python`` of such a program: its open files, folder, environment, signals and
exit status are the program's. Only signals that nobody can catch are not passed on: SIGKILL ends the
program, SIGSTOP does not stop it. The server imports nothing of treadle, so that each program finds it
anew.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
import threading
import traceback
from typing import Any

MAX_FILES = 64
LIBRARIES = ("torch", "transformers.models.llama.configuration_llama")
LIBRARIES += ("litestar", "prometheus_client", "typer")


def serve(fd: int) -> dict[str, Any]:
    """Fork for each program; return its description in the process that is to run it."""
    from importlib import import_module

    for name in LIBRARIES:
        import_module(name)
    assert not [name for name in sys.modules if name.startswith("treadle")]
    gc.freeze()  # a collection in a child would copy every page of the libraries
    # So would counting them, three times for each engine that starts.
    gc.get_freeze_count = lambda: sys.maxsize
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the keepers
    with socket.socket(fileno=fd) as listener:
        while True:
            if 0 in select.select([listener, 0], [], [])[0]:
                os._exit(0)
            connection, _ = listener.accept()
            if os.fork() == 0:
                break
            connection.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return keep(connection)


def keep(connection: socket.socket) -> dict[str, Any]:
    """Run the program in a child, kill it when its asker has gone, and tell how it ended."""
    data, files, _, _ = socket.recv_fds(connection, 1 << 20, MAX_FILES)
    while not data.endswith(b"\n"):
        data += connection.recv(1 << 20)
    program: dict[str, Any] = json.loads(data)
    child = os.fork()
    if child == 0:
        connection.close()
        place(dict(zip(program["files"], files, strict=True)))
        return program
    connection.sendall(b"%d\n" % child)
    ended = os.pidfd_open(child)
    if ended not in select.select([connection, ended], [], [])[0]:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(OSError):  # the asker has gone
        connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def place(files: dict[int, int]) -> None:
    """Give open files the numbers that they had where they come from."""
    free = max(*files, *files.values()) + 1
    for number, file in files.items():  # away from numbers that are still to be given
        os.dup2(file, free + number)
        os.close(file)
    for number in files:
        os.dup2(free + number, number, inheritable=number < 3)
        os.close(free + number)


def become(program: dict[str, Any]) -> None:
    """Run a program as ``python`` does, in this process, and exit.

    Only the modules are not torn down, which takes a second for those of torch.
    """
    status = 0
    try:
        execute(program)
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if status and not isinstance(ended.code, int):
            print(ended.code, file=sys.stderr)
    except BaseException:
        status = 1
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in sys.stdout, sys.stderr:
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)


def execute(program: dict[str, Any]) -> None:
    os.chdir(program["folder"])
    os.environ.clear()
    os.environ.update(program["environment"])
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    how, what, *arguments = program["arguments"]
    if "triton" in sys.modules and "TRITON_INTERPRET" in os.environ:
        # Older versions of torch import it, and it reads the variable as it is imported.
        os.execv(sys.executable, [sys.executable, "-P", how, what, *arguments])
    sys.executable = program["executable"]
    sys.argv[:] = [how, *arguments]
    if how == "-m":
        from runpy import run_module

        run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102


def run(address: str, *arguments: str) -> int:
    """Ask the server to run a program; return its exit status, negative for a signal."""
    if arguments[:1] == ("-P",):
        arguments = arguments[1:]
    if arguments[:1] not in (("-c",), ("-m",)):
        os.execv(sys.executable, [sys.executable, *arguments])
    files = [int(name) for name in os.listdir("/proc/self/fd")]
    files = [number for number in files if number < 3 or is_open(number)]
    program = {
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "arguments": arguments,
        "executable": os.path.join(os.path.dirname(address), "bin", "python"),
        "files": files,
    }
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        data = json.dumps(program).encode() + b"\n"
        sent = socket.send_fds(connection, [data], files)
        connection.sendall(data[sent:])
        with connection.makefile("rb") as answers:
            child = int(answers.readline())
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
                signal.signal(number, lambda number, _: os.kill(child, number))
            return int(answers.readline())


def is_open(number: int) -> bool:
    """Whether a file of the list still is: the folder that was listed is not."""
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        become(serve(int(sys.argv[2])))
    else:
        code = run(*sys.argv[2:])
        if code < 0:
            os.kill(os.getpid(), -code)
        os._exit(code)
