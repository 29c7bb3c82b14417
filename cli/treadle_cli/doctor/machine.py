"""The machine's Python, GPUs and driver, read without importing torch, and what to install for it."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

import msgspec

from treadle.known_plugins import DISTRIBUTIONS, install_hint
from treadle_cli.doctor.survey import DeviceReport

__all__ = ("Machine", "advice", "inspect_machine")

VERSIONS = ("torch", "triton", "transformers", "tokenizers", "safetensors", "pluggy", "msgspec")
INDEX = "https://download.pytorch.org/whl"
# The oldest driver of each CUDA that torch is published for, the newest first.
DRIVERS = ((580, "cu130"), (525, "cu126"))
FOR_CUDA = ("treadle-attention-triton", "treadle-kernels-triton")


class Machine(msgspec.Struct, frozen=True):
    """This machine. ``gpus`` are those that the driver reports, whether torch can use them or not."""

    python: str
    platform: str
    versions: dict[str, str]
    gpus: list[str]
    driver: str


def inspect_machine(installed: Iterable[str], proc: Path = Path("/proc")) -> Machine:
    """Read versions, including those of ``installed`` distributions, and devices from ``/proc``."""
    return Machine(
        python=platform.python_version(),
        platform=platform.platform(terse=True),
        versions=dict(_versions((*sorted(installed), *VERSIONS))),
        gpus=list(_gpus(proc)),
        driver=_driver(proc),
    )


def _versions(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    for name in names:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue


def _gpus(proc: Path) -> Iterator[str]:
    for file in sorted(proc.glob("driver/nvidia/gpus/*/information")):
        try:
            match = re.search(r"^Model:\s*(.+)$", file.read_text(), re.MULTILINE)
        except OSError:
            continue
        yield match[1].strip() if match else "NVIDIA GPU"


def _driver(proc: Path) -> str:
    try:
        text = (proc / "driver/nvidia/version").read_text()
    except OSError:
        return ""
    match = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", text)
    return match[1] if match else ""


def advice(
    machine: Machine, device: DeviceReport | None, installed: Iterable[str]
) -> Iterator[str]:
    """Yield what to install or change, one sentence each; nothing on a machine without a GPU."""
    if not machine.gpus:
        return
    gpu = machine.gpus[0]
    if device is None:
        return
    if device.cuda is None:
        yield f"{gpu} is there, but torch {device.torch} is built without CUDA; {_torch(machine)}"
    elif not device.device.startswith("cuda"):
        yield (
            f"{gpu} is there, but torch {device.torch} finds no device; check CUDA_VISIBLE_DEVICES, "
            f"or that driver {machine.driver or '(unknown)'} is new enough for CUDA {device.cuda}"
        )
    elif tuple(map(int, device.capability.split("."))) < (8, 0):
        yield f"{device.name} has compute capability {device.capability}; fast kernels begin at 8.0"
        return
    missing = [name for name in FOR_CUDA if name not in set(installed) and name in DISTRIBUTIONS]
    if missing:
        yield f"fast attention and kernels for {gpu}: {install_hint(*missing)}"


def _torch(machine: Machine) -> str:
    try:
        major = int(machine.driver.partition(".")[0])
    except ValueError:
        return f"pip install torch --index-url {INDEX}/{DRIVERS[0][1]}"
    for min_version, build in DRIVERS:
        if major >= min_version:
            return f"pip install torch --index-url {INDEX}/{build}"
    return f"update the NVIDIA driver {machine.driver} to {DRIVERS[-1][0]} or later first"
