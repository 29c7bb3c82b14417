"""Kernels that are compiled for Hopper in processes, without a device: what they leave on disk, and what is
done where one fails, hangs, or loses its parent."""

from __future__ import annotations

import ast
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from treadle_triton_kit import compile_processes
from treadle_triton_kit.compile_ahead import CompileAhead, PendingKernel

pytest.importorskip("triton")

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime import driver

from treadle_triton_kit.tma import tensor_descriptor

SECONDS = 60
ROOT = os.getpid()


def happens(kind, _semantic=None):
    """What the compiler does in a process that is not the test's."""
    if os.getpid() != ROOT:
        match kind.value:
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hangs":
                signal.pause()
            case "fails":
                raise ValueError("not in this process")
    return tl.constexpr(1)


happens.__triton_builtin__ = True


@triton.jit
def accident(x, KIND: tl.constexpr):
    tl.store(x, happens(KIND))


@triton.jit
def scale(
    x,
    out,
    shape,
    n,
    factor,
    DTYPE: tl.constexpr,
    ASM: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offsets, offsets < n).to(DTYPE) * factor + shape[0]
    tl.store(out + offsets, value, offsets < n)


@gluon.jit
def copy_tile(source, target, LAYOUT: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    smem = gl.allocate_shared_memory(source.dtype, source.block_shape, source.layout)
    value = smem.load(layout)
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))
    columns = gl.arange(0, 64, gl.SliceLayout(0, layout))
    gl.store(target + rows[:, None] * 64 + columns[None, :], value)


class Hopper:
    """The driver of a device that loads kernels and does not run them."""

    launcher_cls = staticmethod(lambda source, metadata: None)
    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 2**18},
        load_binary=lambda *args: (object(), object(), 32, 0, 1024),
    )

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        assert device == 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class Start:
    """Kernels that are launched in vain, and whether this process found each on disk."""

    def __init__(self) -> None:
        self.ahead = CompileAhead()
        self.found: list[tuple[str, bool]] = []

    def compile(self, *launches: Callable[[], object]) -> None:
        for function in (accident, scale, copy_tile):
            function.device_caches.clear()
        self.ahead.open()
        try:
            with self.ahead.collecting() as compiles:
                assert compiles
                for launch in launches:
                    launch()
            self.ahead.wait()
        finally:
            self.ahead.close()
        for function in (accident, scale, copy_tile):
            for kernel in function.device_caches[0][0].values():
                if isinstance(kernel, PendingKernel):
                    kernel.run  # noqa: B018  # raises why it was not compiled

    def listen(self, *, src: Any, cache_hit: bool, **facts: object) -> None:
        self.found.append((src.name, cache_hit))


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Start]:
    start = Start()
    monkeypatch.setattr(driver, "_active", Hopper())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(knobs.compilation, "listener", start.listen)
    before = children(os.getpid())
    yield start
    assert children(os.getpid()) == before


def children(process: int) -> set[int]:
    tasks = Path(f"/proc/{process}/task").glob("*/children")
    return {int(child) for task in tasks for child in task.read_text().split()}


def launch_accident(kind: str) -> Callable[[], object]:
    return lambda: accident[(1,)](torch.zeros(1), kind)


def launches() -> list[Callable[[], object]]:
    x = torch.zeros(64, 64, dtype=torch.bfloat16)

    def scaled(*constants: object, n: int = 4096) -> Callable[[], object]:
        return lambda: scale[(1,)](x, x, (2, 3), n, 0.5, *constants, 64, num_warps=2)

    return [
        scaled(tl.float32, "mov", True),
        scaled(tl.bfloat16, "", None),
        scaled(tl.bfloat16, "", None, n=1),
        lambda: copy_tile[(1,)](tensor_descriptor(x, (64, 64)), x, 0),
    ]


def test_a_process_compiles_what_this_one_looks_for(start: Start, tmp_path: Path) -> None:
    start.compile(*launches())
    assert sorted(start.found) == [("copy_tile", True), *[("scale", True)] * 3]
    assert start.ahead.compiled == 4
    assert len({path.parent for path in tmp_path.rglob("*.cubin")}) == 4


def test_a_process_compiles_kernels_of_packed_weights(start: Start) -> None:
    from treadle_kernels_triton.hopper.packed_product import multiply

    from treadle_layers_kit.packed_layout import E2M1, pack_words

    codes = pack_words(torch.zeros(128, 128, dtype=torch.uint8), E2M1, 32)
    scales, counters = torch.zeros(4, 128, dtype=torch.uint8), torch.zeros(528, dtype=torch.int32)
    x = torch.zeros(32, 128, dtype=torch.bfloat16)
    start.compile(lambda: multiply(x, codes, scales, None, None, E2M1, 32, 32, counters, 132))
    assert start.found == [("packed_hopper_kernel", True)]


def test_nothing_is_forked_for_what_is_on_disk(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    start.compile(*launches())
    begun = []
    monkeypatch.setattr(compile_processes.CompileProcesses, "_compiler", begun.append)
    again = Start()
    monkeypatch.setattr(knobs.compilation, "listener", again.listen)
    again.compile(*launches())
    assert [hit for _, hit in again.found] == [True] * 4
    assert again.ahead.compiled == 0 and begun == []


@pytest.mark.parametrize("kind", ["killed", "hangs"])
def test_a_process_that_ends_or_hangs_costs_a_limited_time(
    start: Start, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compile_processes, "COMPILE_SECONDS", 0.5)
    begin = time.monotonic()
    start.compile(launch_accident(kind))
    assert start.found == [("accident", False)] and start.ahead.compiled == 1
    assert time.monotonic() - begin < SECONDS
    (message,) = caplog.messages
    assert message.startswith("kernels are compiled in this process; another failed at it")


def test_a_server_that_hangs_costs_a_limited_time(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_processes, "FORK_SECONDS", 0.5)
    monkeypatch.setattr(compile_processes, "CLOSE_SECONDS", 0.5)
    monkeypatch.setattr(compile_processes, "_prepare", lambda *_: signal.pause())
    start.compile(*launches())
    assert sorted(start.found) == [("copy_tile", False), *[("scale", False)] * 3]


def test_kernels_are_parsed_again_if_threads_disturb_the_parser(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Python 3.11.2 does now and then, where processes do not compile."""
    mismatch = SystemError("AST constructor recursion depth mismatch (before=36, after=26)")
    parse, errors = ast.parse, [mismatch] * 3

    def disturbed(*arguments: Any, **named: Any) -> ast.AST:
        if errors:
            raise errors.pop()
        return parse(*arguments, **named)

    with monkeypatch.context() as patched:  # of what pytest, too, needs to tell of an error
        patched.setattr(os, "fork", no_fork)
        patched.setattr(ast, "parse", disturbed)
        start.compile(launch_accident("nothing"))
    assert start.found == [("accident", False)] and not errors


def no_fork() -> int:
    raise OSError("no memory")


def test_an_error_of_a_process_is_not_the_last_word(start: Start) -> None:
    start.compile(launch_accident("fails"), launch_accident("nothing"))
    assert sorted(start.found) == [("accident", False), ("accident", True)]


def test_without_a_fork_threads_compile(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fork", no_fork)
    start.compile(launch_accident("nothing"))
    assert start.found == [("accident", False)] and start.ahead.compiled == 1


PARENT = """
import contextlib, json, os, sys, threading, time
from pathlib import Path
import test_triton_compile_processes as test
from triton.runtime import driver
driver._active = test.Hopper()
test.ROOT = os.getpid()
start = test.Start()
threading.Thread(target=start.compile, args=[test.launch_accident("hangs")], daemon=True).start()
descendants = set()
while not descendants:
    time.sleep(0.01)
    for server in test.children(os.getpid()):
        if compilers := test.children(server):
            descendants = {server, *compilers}
open_files = []
for pid in descendants:
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            open_files.append(os.readlink(entry))
print(json.dumps([sorted(descendants), sorted(set(open_files))]), flush=True)
if sys.argv[1] == "exits":
    os._exit(0)
time.sleep(60)
"""


def lives(pid: int) -> bool:
    """Return whether a process has not ended, and wait for it if that is for this process to do."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == 0
    except ChildProcessError:  # its parent lives, or has waited for it
        return Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("how", ["exits", "killed"])
def test_no_process_outlives_its_parent(how: str, tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    folders = [os.environ.get("PYTHONPATH", ""), str(Path(__file__).parent)]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    command = [sys.executable, "-c", PARENT, how]
    # Orphans come here, not to a process that may not look after them.
    become_subreaper = ctypes.CDLL(None).prctl
    become_subreaper(36, 1, 0, 0, 0)
    try:
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as parent:
            assert parent.stdout is not None
            descendants, files = json.loads(parent.stdout.readline())
            if how == "killed":
                parent.kill()
            parent.wait(SECONDS)
        deadline = time.monotonic() + SECONDS
        while descendants and time.monotonic() < deadline:
            descendants = [pid for pid in descendants if lives(pid)]
            time.sleep(0.01)
        assert descendants == []
    finally:
        become_subreaper(36, 0, 0, 0, 0)
    kinds = {file.split(":")[0] for file in files} - {"/dev/null"}
    assert kinds <= {"socket", "pipe", os.readlink("/proc/self/fd/2").split(":")[0]}
