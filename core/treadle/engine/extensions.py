"""Extensions from the start of an engine to its end."""

from __future__ import annotations

import logging

from treadle.config import EngineConfig
from treadle.plugins import Entry, PluginManager

__all__ = ("ConfiguredExtensions",)

log = logging.getLogger("treadle.plugins")


class ConfiguredExtensions:
    """The extensions of one engine, configured in name order.

    If one fails, those before it are unconfigured and ``PluginLoadError`` is raised.
    """

    def __init__(self, plugins: PluginManager, config: EngineConfig) -> None:
        self._plugins = plugins
        self._configured: list[Entry] = []
        for entry in plugins.extensions():
            try:
                plugins.hooks(entry, wrapped=False).treadle_configure(config=config)
            except Exception:
                self.unconfigure()
                raise
            self._configured.append(entry)

    def unconfigure(self) -> None:
        """Let them release their resources, the last first. Failures are logged. May be called twice."""
        while self._configured:
            entry = self._configured.pop()
            try:
                self._plugins.hooks(entry, wrapped=False).treadle_unconfigure()
            except Exception as error:  # the others must still be released
                log.error("%s", error, exc_info=error)
