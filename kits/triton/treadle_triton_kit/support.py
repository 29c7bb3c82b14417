"""Where Triton kernels run. Imports neither torch nor Triton, so that an offer may ask."""

from __future__ import annotations

from importlib.util import find_spec

from treadle.api.cache import DeviceInfo

__all__ = ("is_triton_installed", "missing_triton", "supports_pdl", "triton_refusals")

MIN_CAPABILITY = (8, 0)


def is_triton_installed() -> bool:
    """Return whether Triton can be imported, without importing it."""
    return find_spec("triton") is not None


def missing_triton() -> list[str]:
    """Return a reason if Triton is not installed, else nothing."""
    return [] if is_triton_installed() else ["triton is not installed; torch for CUDA brings it"]


def triton_refusals(device: DeviceInfo) -> list[str]:
    """Return every reason why Triton kernels cannot run on ``device``; empty if they can.

    A device whose capability is unknown is not refused for it.
    """
    reasons = []
    if device.type != "cuda":
        reasons.append(f"device {device.type!r} is not CUDA")
    elif device.capability is not None and device.capability < MIN_CAPABILITY:
        reasons.append(f"capability {'.'.join(map(str, device.capability))} is below 8.0")
    return reasons + missing_triton()


def supports_pdl(device: DeviceInfo) -> bool:
    """Return whether kernels may be launched with ``launch_pdl`` (see ``pdl``): Hopper and later."""
    return device.type == "cuda" and (device.capability or (0, 0)) >= (9, 0)
