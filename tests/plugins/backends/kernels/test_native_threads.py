"""Threads of treadle-kernels-native: they meet whatever comes between steps, and sleep when nothing comes."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from treadle_kernels_native import library
from treadle_kernels_native.structs import Format, Linear, Model

# Where there is a compiler, a library that was not built is a failure of the build hook.
if library.missing_reason() is not None and shutil.which("cc") is None:
    pytest.skip(str(library.missing_reason()), allow_module_level=True)

LIBRARY = library.load_library()
SHORT, LONG = 50e-6, 500e-6
"""Seconds that a thread spins in a step, and between two that follow each other soon."""


@pytest.fixture(scope="module", params=["a futex", "a condition, as without Linux"])
def native(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The library, and one whose threads sleep as they do on other systems."""
    if request.param == "a futex":
        return LIBRARY
    compiler, sources = shutil.which("cc"), Path(library.__file__).parent / "csrc"
    if compiler is None or not sources.is_dir():
        pytest.skip("there is no cc, or no source of the library beside it")
    path = tmp_path_factory.mktemp("library") / library.LIBRARY_NAME
    flags = ["-std=gnu11", "-O1", "-w", "-fPIC", "-shared", "-pthread", "-U__linux__"]
    files = map(str, sources.glob("*.c"))
    subprocess.run([compiler, *flags, "-o", str(path), *files, "-lm"], check=True)
    return library.load_library(path)


@pytest.fixture
def engine(native: ctypes.CDLL) -> Iterator[tuple[ctypes.CDLL, int]]:
    model = Model(hidden=64, heads=1, kv_heads=1, head_size=64, intermediate=64, page_size=16)
    handle = native.tn_create(ctypes.byref(model), 3, library.instruction_sets(native)[-1], 0)
    yield native, handle
    native.tn_destroy(handle)


def run(engine: tuple[ctypes.CDLL, int], pauses: list[float]) -> None:
    """Multiply once behind each pause; every result must be right."""
    native, handle = engine
    weight, x = torch.randn(256, 64), torch.randn(5, 64)
    linear = Linear(weight=weight.data_ptr(), n=256, k=64, format=Format.FLOAT32)
    expected, y = x.double() @ weight.double().T, torch.empty(5, 256)
    for pause in pauses:
        end = time.perf_counter() + pause
        while time.perf_counter() < end:
            pass  # a sleep would be longer
        y.fill_(torch.nan)
        native.tn_multiply(handle, ctypes.byref(linear), x.data_ptr(), 5, y.data_ptr())
        torch.testing.assert_close(y.double(), expected, atol=1e-4, rtol=0)


def test_steps_are_whole_whether_threads_spin_or_sleep(engine: tuple[ctypes.CDLL, int]) -> None:
    """Jobs come while threads spin, when they fall asleep, and long after."""
    edges = [0.0, SHORT / 2, SHORT, 1.2 * SHORT, LONG / 2, LONG, 1.1 * LONG, 4 * LONG]
    run(engine, edges * 20)


def test_threads_without_work_use_no_core(engine: tuple[ctypes.CDLL, int]) -> None:
    """Also behind steps that came so soon that threads spun on for them."""
    run(engine, [LONG / 4] * 50)
    time.sleep(20 * LONG)
    before = os.times()
    time.sleep(0.5)
    after = os.times()
    assert after.user + after.system - before.user - before.system < 0.1
