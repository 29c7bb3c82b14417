"""Which kinds of plugins are installed: the core's, and those that other distributions declare."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from types import MappingProxyType
from typing import Any

from treadle.api.kinds import CORE_KINDS
from treadle.api.plugin_kind import DECLARATIONS, PluginKind
from treadle.errors import ConfigError
from treadle.known_plugins import may_import
from treadle.plugin_metadata import entry_points, identity

__all__ = ("check_known", "installed_kinds")

log = logging.getLogger("treadle.plugins")


@cache
def installed_kinds() -> Mapping[str, PluginKind[Any]]:
    """Return every kind by name: the core's, then those of other installed distributions."""
    kinds = {kind.name: kind for kind in CORE_KINDS}
    points = {
        point.name: point
        for dist in metadata.distributions()
        for point in entry_points(dist)
        if point.group == DECLARATIONS and may_import(identity(dist)[0])
    }
    for _, point in sorted(points.items()):
        try:
            kind = point.load()
        except Exception as error:  # another distribution's module may raise anything
            log.warning("the kind %s cannot be declared: %s: %s", point.name, point.value, error)
            continue
        if not isinstance(kind, PluginKind) or kind.name != point.name:
            log.warning("%s does not declare the kind %r", point.value, point.name)
        else:
            kinds.setdefault(kind.name, kind)
    return MappingProxyType(kinds)


def check_known(kind: str, kinds: Mapping[str, PluginKind[Any]], where: str) -> None:
    """Raise ``ConfigError`` for a name that is no kind; ``where`` is what the user wrote."""
    if kind not in kinds:
        hint = "".join(f"did you mean {k!r}? " for k in difflib.get_close_matches(kind, kinds, n=1))
        names = f"{hint}known kinds: {', '.join(kinds)}"
        raise ConfigError(f"{where}: there is no kind {kind!r}; {names}")
