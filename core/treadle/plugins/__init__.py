"""The plugin manager: finds plugins without importing them, imports the ones that are used."""

from treadle.api.plugin_kind import PluginKind
from treadle.plugins.entries import Entry
from treadle.plugins.kinds import installed_kinds
from treadle.plugins.manager import PluginManager
from treadle.plugins.registry import PluginSelection

__all__ = ("Entry", "PluginKind", "PluginManager", "PluginSelection", "installed_kinds")
