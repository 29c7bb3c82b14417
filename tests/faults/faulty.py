"""A plugin manager with one plugin of a test's own, and what its calls came to."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import uuid4

from treadle.config import PluginConfig
from treadle.plugins import PluginManager

__all__ = ("errors", "failing_plugins", "plugins_of")


def plugins_of(folder: Path, source: str, **config: Any) -> PluginManager:
    """A plugin manager with the plugins of ``source``, in a module that no other test has imported."""
    file = folder / f"faulty_{uuid4().hex}.py"
    file.write_text(source)
    return PluginManager(PluginConfig(plugin_file=[str(file)], **config))


def errors(page: str, plugin: str) -> dict[str, float]:
    """Failed calls of a plugin by hook or method, as the page ``/metrics`` tells."""
    counts = {}
    for line in page.splitlines():
        labels, _, count = line.rpartition(" ")
        if labels.startswith("treadle_plugin_calls_total{") and f'plugin="{plugin}"' in labels:
            hook = labels.partition('hook="')[2].partition('"')[0]
            if 'outcome="error"' in labels:
                counts[hook] = float(count)
    return counts


def failing_plugins(folder: Path, source: str, failure: str, **config: Any) -> PluginManager:
    """``plugins_of`` with an option ``failure`` that the plugin fails by."""
    return plugins_of(
        folder, source, plugin_options={"server:faulty": {"failure": failure}}, **config
    )
