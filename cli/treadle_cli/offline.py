"""What the commands share that run a file of requests."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from treadle.errors import PluginNotFoundError
from treadle.known_plugins import install_hint

__all__ = ("need_server", "progress_bar")


def need_server(command: str) -> None:
    """Raise ``PluginNotFoundError`` unless treadle-server is installed."""
    if importlib.util.find_spec("treadle_server") is None:
        hint = install_hint("treadle-server")
        raise PluginNotFoundError(f"treadle {command} needs the server; {hint}")


def progress_bar(unit: str) -> Any:
    """Return a bar of tqdm on standard error, which shows nothing unless that is a terminal."""
    from tqdm import tqdm

    return tqdm(unit=f" {unit}", dynamic_ncols=True, disable=not sys.stderr.isatty())
