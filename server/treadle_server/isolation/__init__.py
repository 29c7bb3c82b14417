"""Plugins that nobody trusts, in processes that can be killed: ``--isolate KIND:KEY``.

``plugin`` is what the plugin manager gets in place of the plugin. Its hooks return proxies, made from
the protocols of the kinds, which send each call to a child (``process``). The child (``child``)
imports the plugin and calls it. ``wire`` is what travels between the two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treadle.plugins import PluginManager

__all__ = ("refused",)


def refused(plugins: PluginManager) -> dict[str, str]:
    """Return the isolated plugins that are not called at the moment, with the reason."""
    loaded: dict[str, Any] = plugins.loader.plugins
    return {
        entry.id: refusal
        for entry in plugins.entries
        if entry.plugin in plugins.loader.isolated and entry.plugin in loaded
        for part in loaded[entry.plugin].parts
        if (refusal := part.refusal)
    }
