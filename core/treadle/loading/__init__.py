"""Finding checkpoints, reading their configuration, and loading their weights.

The names below are imported on first use, since some need torch: importing the entry-point modules
``sources`` and ``formats`` must not import it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treadle.loading.build import build_model
    from treadle.loading.config import read_config
    from treadle.loading.download import fetch
    from treadle.loading.sources import parse_ref
    from treadle.loading.weights import load_weights

__all__ = ("build_model", "fetch", "load_weights", "parse_ref", "read_config")

_HOMES = {
    "build_model": "build",
    "fetch": "download",
    "load_weights": "weights",
    "parse_ref": "sources",
    "read_config": "config",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
