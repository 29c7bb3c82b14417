"""treadle-kernels-native on machines that are not here: built for them, and run where one can be emulated."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from numpy.typing import NDArray
from treadle_kernels_native import library
from treadle_kernels_native.structs import InstructionSet

SOURCES = Path(library.__file__).parent / "csrc"
HOOK = SOURCES.parents[1] / "hatch_build.py"
if not HOOK.is_file():
    pytest.skip("the distribution was not installed editable", allow_module_level=True)

ZIG = [sys.executable, "-m", "ziglang", "cc"]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("native_build_hook", HOOK)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(compiler: list[str], flags: list[str], target: Path, *others: Path) -> None:
    files = [str(path) for path in (*others, *SOURCES.glob("*.c"))]
    command = [*compiler, *flags, "-I", str(SOURCES), "-o", str(target), *files, "-lm"]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[-4000:]


def program(compiler: list[str], folder: Path, *flags: str) -> Path:
    target = folder / "steps"
    steps = Path(__file__).with_name("native_steps.c")
    build(compiler, ["-std=gnu11", "-O2", "-w", "-pthread", *flags], target, steps)
    return target


def needs_zig() -> None:
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("there is no ziglang to build for other machines")


def emulator(machine: str) -> str:
    for name in (f"qemu-{machine}", f"qemu-{machine}-static"):
        if path := shutil.which(name):
            return path
    pytest.skip(f"there is no qemu-{machine}")


@pytest.fixture(scope="module")
def x86_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None or platform.machine() != "x86_64":
        pytest.skip("there is no cc for x86-64")
    return program([compiler], tmp_path_factory.mktemp("x86"), "-march=x86-64")


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    """Return the command that runs the program on an emulated machine of a type."""

    @cache
    def command(machine: str) -> list[str]:
        needs_zig()
        # With a C library of its own, which an emulated program finds nowhere else.
        flags = ("-target", f"{machine}-linux-musl", "-mcpu=baseline", "-static")
        return [emulator(machine), str(program(ZIG, tmp_path_factory.mktemp(machine), *flags))]

    return command


@pytest.mark.parametrize(
    ("machine", "best"),
    [
        ("qemu64", InstructionSet.GENERIC),
        ("Haswell,-fma", InstructionSet.GENERIC),
        ("Haswell", InstructionSet.AVX2),
    ],
)
def test_lesser_machines_run_what_they_have(
    x86_program: Path, machine: str, best: InstructionSet
) -> None:
    """An emulated machine ends a program by SIGILL for what it lacks; it has no AVX-512."""
    command = [emulator("x86_64"), "-cpu", machine, str(x86_program), "20"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, f"sound to {best}\n"), run.stderr[-2000:]


Logits = dict[int, dict[tuple[str, ...], NDArray[np.float64]]]
"""Of each instruction set: format, threads and step, and the numbers."""


def logits(*command: str) -> Logits:
    run = subprocess.run([*command, "20", "print"], capture_output=True, text=True)
    assert run.returncode == 0, (run.stdout[-200:], run.stderr[-2000:])
    found: Logits = defaultdict(dict)
    for line in run.stdout.splitlines()[:-1]:
        key, numbers = line.split(":")
        isa, *case = key.split()
        found[int(isa)][tuple(case)] = np.array(numbers.split(), dtype=np.float64)
    return found


@pytest.mark.parametrize(
    ("machine", "cpu", "sets"),
    [
        ("aarch64", "cortex-a72", [InstructionSet.GENERIC]),
        ("aarch64", "neoverse-n1", [InstructionSet.GENERIC, InstructionSet.DOTPROD]),
        ("aarch64", "max", [InstructionSet.GENERIC, InstructionSet.DOTPROD, InstructionSet.I8MM]),
        ("riscv64", "rv64", [InstructionSet.GENERIC]),
    ],
)
def test_other_machines_compute_what_this_one_does(
    emulated: Callable[[str], list[str]],
    x86_program: Path,
    machine: str,
    cpu: str,
    sets: list[InstructionSet],
) -> None:
    """Whole steps in every format, on each instruction set of an emulated machine."""
    command, path = emulated(machine)
    expected = logits(str(x86_program))[InstructionSet.GENERIC]
    actual = logits(command, "-cpu", cpu, path)
    assert list(actual) == sets
    for isa in sets:
        assert set(actual[isa]) == set(expected)
        for case, values in expected.items():
            # The deviation of logits is one. Formats other than float32 round what is multiplied.
            error = np.abs(actual[isa][case] - values).max()
            assert error < (1e-4 if case[0] == "0" else 0.2), (isa, case)


@pytest.mark.parametrize(
    ("system", "machine"),
    [("linux", "aarch64"), ("linux", "riscv64"), ("darwin", "arm64"), ("darwin", "x86_64")],
)
def test_the_hook_builds_for_other_systems(
    hook: ModuleType, tmp_path: Path, system: str, machine: str
) -> None:
    needs_zig()
    target = tmp_path / hook.LIBRARY
    build(ZIG, [*hook.zig_target(system, machine), *hook.FLAGS], target)
    assert target.read_bytes()[:4] == (b"\x7fELF" if system == "linux" else b"\xcf\xfa\xed\xfe")
