"""Kernels that are compiled in threads; a function in the place of Triton's compiler says who compiles what."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from treadle_triton_kit.compile_ahead import CompileAhead, is_collecting
from treadle_triton_kit.self_check import checked_once, self_check

pytest.importorskip("triton")

from triton import knobs
from triton.runtime import cache, driver
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

SECONDS = 30


class Kernel:
    """A compiled kernel, which is loaded when somebody first asks for what launches it."""

    def __init__(self, key: str, compiler: Compiler) -> None:
        self.key, self.compiler = key, compiler

    @property
    def run(self) -> Callable[[], None]:
        if self.key not in dict(self.compiler.loaded):
            self.compiler.loaded.append((self.key, threading.get_ident()))
        return lambda: self.compiler.launched.append(self.key)


class Device:
    """The device of a thread, in the place of Triton's driver."""

    def set_current_device(self, device: int) -> None:
        assert device == 0


class Compiler:
    """Compiles two kernels at once, or none, in the place of a function of Triton."""

    def __init__(self) -> None:
        self.both = threading.Barrier(2)
        self.device_caches: dict[int, tuple[dict[str, Any]]] = {0: ({},)}
        self.compiled: list[tuple[str, int]] = []
        self.launched: list[str] = []
        self.loaded: list[tuple[str, int]] = []

    def compile(
        self, key: str, signature: object, device: int, *, is_known: bool = False
    ) -> Kernel:
        if key == "wrong":
            raise ValueError("this kernel cannot be compiled")
        if threading.current_thread().name.startswith("treadle-compile"):
            self.both.wait(SECONDS)
        self.compiled.append((key, threading.get_ident()))
        knobs.compilation.listener(cache_hit=is_known, src=None)
        self.device_caches[device][0][key] = kernel = Kernel(key, self)
        return kernel

    def launch(self, key: str, **options: bool) -> None:
        """As Triton does: look for the kernel, compile it, run it."""
        kernel = self.device_caches[0][0].get(key)
        if kernel is None:
            kernel = JITFunction._do_compile(self, key, None, 0, **options)
        kernel = kernel.result() if hasattr(kernel, "result") else kernel
        kernel.run()


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    compiler = Compiler()
    monkeypatch.setattr(
        JITFunction, "_do_compile", lambda owner, *args, **options: owner.compile(*args, **options)
    )
    monkeypatch.setattr(Autotuner, "run", lambda tuner: "tuned")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setattr(cache, "triton_key", lambda: "of a test")
    monkeypatch.setattr(driver, "_active", Device())
    return compiler


@pytest.fixture
def ahead(compiler: Compiler) -> Iterator[CompileAhead]:
    ahead = CompileAhead()
    ahead.open()
    yield ahead
    ahead.close()


def test_kernels_are_compiled_in_threads_and_once(compiler: Compiler, ahead: CompileAhead) -> None:
    with ahead.collecting() as compiles:
        assert compiles and is_collecting()
        for key in ("a", "a", "b"):
            compiler.launch(key)
        assert Autotuner.run(None) is None
    assert not is_collecting() and compiler.launched == []
    for key in ("a", "b", "c"):
        compiler.launch(key)
    assert compiler.launched == ["a", "b", "c"]
    assert Autotuner.run(None) == "tuned"
    here = threading.get_ident()
    for work in (compiler.compiled, compiler.loaded):
        assert sorted((key, thread == here) for key, thread in work) == (
            [("a", False), ("b", False), ("c", True)]
        )
    assert ahead.compiled == 3


def test_who_runs_kernels_that_wait_for_others_waits_first(
    compiler: Compiler, ahead: CompileAhead
) -> None:
    ahead.wait()
    with ahead.collecting():
        for key in ("a", "b", "wrong"):
            compiler.launch(key)
    ahead.wait()
    assert sorted(key for key, _ in compiler.loaded) == ["a", "b"]


def test_kernels_that_are_on_disk_do_not_count(compiler: Compiler, ahead: CompileAhead) -> None:
    compiler.launch("a", is_known=True)
    assert ahead.compiled == 0


def test_who_launches_hears_of_a_failure(compiler: Compiler, ahead: CompileAhead) -> None:
    with ahead.collecting():
        compiler.launch("wrong")
    with pytest.raises(ValueError, match="cannot be compiled"):
        compiler.launch("wrong")
    with ahead.collecting():
        raise ValueError("results are anything, and so nobody hears of this")


def test_other_threads_launch_in_earnest(compiler: Compiler, ahead: CompileAhead) -> None:
    with ahead.collecting(), ThreadPoolExecutor(1) as other:
        other.submit(compiler.launch, "a").result(SECONDS)
        assert not other.submit(is_collecting).result(SECONDS)
    assert compiler.launched == ["a"]


def test_nothing_stays_behind(compiler: Compiler) -> None:
    before = JITFunction._do_compile, Autotuner.run, knobs.compilation.listener
    first, second = CompileAhead(), CompileAhead()
    with first.collecting() as compiles:
        assert not compiles  # before it is open
    first.open()
    second.open()
    second.close()
    first.close()
    assert (JITFunction._do_compile, Autotuner.run, knobs.compilation.listener) == before


def test_a_trial_says_nothing_while_nothing_runs(
    ahead: CompileAhead, caplog: pytest.LogCaptureFixture
) -> None:
    log = logging.getLogger("treadle.trial")

    def fails() -> bool:
        raise ValueError("anything")

    @checked_once
    def works(name: str) -> bool:
        return self_check(lambda: False, log, "not here (%s)")

    with ahead.collecting():
        assert self_check(fails, log, "not here (%s)")
        assert works("a")
    assert caplog.messages == []
    assert not works("a") and not works("a")
    assert not self_check(fails, log, "not here (%s)")
    assert caplog.messages == [
        "not here (its results are wrong)",
        "not here (ValueError: anything)",
    ]
