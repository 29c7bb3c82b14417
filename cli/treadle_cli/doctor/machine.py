"""What this machine has, without importing torch, and what to install for it."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

import msgspec

from treadle.known_plugins import DISTRIBUTIONS, install_hint
from treadle_cli.doctor.survey import DeviceReport

__all__ = ("Machine", "advice", "look")

VERSIONS = ("torch", "triton", "transformers", "tokenizers", "safetensors", "pluggy", "msgspec")
INDEX = "https://download.pytorch.org/whl"
# The oldest driver of each CUDA that torch is published for, the newest first.
DRIVERS = ((580, "cu130"), (525, "cu126"))
FOR_CUDA = ("treadle-attention-triton", "treadle-kernels-triton")


class Machine(msgspec.Struct, frozen=True):
    """The GPUs are those that the driver knows, whether torch can use them or not."""

    python: str
    platform: str
    versions: dict[str, str]
    gpus: list[str]
    driver: str


def look(installed: Iterable[str], proc: Path = Path("/proc")) -> Machine:
    """Read versions, those of ``installed`` distributions among them, and devices from ``/proc``."""
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
            found = re.search(r"^Model:\s*(.+)$", file.read_text(), re.MULTILINE)
        except OSError:
            continue
        yield found[1].strip() if found else "NVIDIA GPU"


def _driver(proc: Path) -> str:
    try:
        text = (proc / "driver/nvidia/version").read_text()
    except OSError:
        return ""
    found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", text)
    return found[1] if found else ""


def advice(machine: Machine, seen: DeviceReport | None, installed: Iterable[str]) -> Iterator[str]:
    """What to install or change, one sentence each; nothing on a machine without a GPU."""
    if not machine.gpus:
        return
    gpu = machine.gpus[0]
    if seen is None:
        return
    if seen.cuda is None:
        yield f"{gpu} is there, but torch {seen.torch} is built without CUDA; {_torch(machine)}"
    elif not seen.device.startswith("cuda"):
        yield (
            f"{gpu} is there, but torch {seen.torch} finds no device; check CUDA_VISIBLE_DEVICES, "
            f"or that driver {machine.driver or '(unknown)'} is new enough for CUDA {seen.cuda}"
        )
    elif tuple(map(int, seen.capability.split("."))) < (8, 0):
        yield f"{seen.name} has compute capability {seen.capability}; fast kernels begin at 8.0"
        return
    missing = [name for name in FOR_CUDA if name not in set(installed) and name in DISTRIBUTIONS]
    if missing:
        yield f"fast attention and kernels for {gpu}: {install_hint(*missing)}"


def _torch(machine: Machine) -> str:
    try:
        major = int(machine.driver.partition(".")[0])
    except ValueError:
        return f"pip install torch --index-url {INDEX}/{DRIVERS[0][1]}"
    for oldest, build in DRIVERS:
        if major >= oldest:
            return f"pip install torch --index-url {INDEX}/{build}"
    return f"update the NVIDIA driver {machine.driver} to {DRIVERS[-1][0]} or later first"
