"""The device of a rank, and dtypes by the names of options."""

from __future__ import annotations

import torch

from treadle.errors import ConfigError

__all__ = ("pick_device", "torch_dtype")

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def pick_device(name: str, rank: int = 0) -> torch.device:
    """Return a rank's device; ``auto`` is CUDA or CPU. Raises ``ConfigError`` if it is missing."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(
                "device is 'cuda', but torch finds no CUDA device; install a CUDA build of torch "
                "and a driver, or use device='cpu'"
            )
        device = torch.device("cuda", (device.index or 0) + rank)
        if device.index >= torch.cuda.device_count():
            raise ConfigError(
                f"device {device} does not exist; CUDA devices: {torch.cuda.device_count()}"
            )
    return device


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of an option value."""
    return DTYPES[name]
