"""Devices and dtypes, in the words of options and of the plugin contract."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.api.cache import DeviceInfo

if TYPE_CHECKING:
    import torch

__all__ = ("device_info", "dtype_name")


def device_info(device: torch.device) -> DeviceInfo:
    """Describe a device to plugins."""
    if device.type != "cuda":
        return DeviceInfo(type=device.type)
    import torch

    properties = torch.cuda.get_device_properties(device)
    return DeviceInfo(
        type="cuda",
        capability=(properties.major, properties.minor),
        memory=properties.total_memory,
        name=properties.name,
    )


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")
