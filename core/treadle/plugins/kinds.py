"""Which kinds of plugins are installed: the core's, and those that other distributions declare."""

from __future__ import annotations

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

__all__ = ("check_known", "installed_kinds")

log = logging.getLogger("treadle.plugins")


@cache
def installed_kinds() -> Mapping[str, PluginKind[Any]]:
    """Return every kind by name: the core's, then those of other installed distributions."""
    kinds = {kind.name: kind for kind in CORE_KINDS}
    points = metadata.entry_points(group=DECLARATIONS)
    allowed = (p for p in points if p.dist is None or may_import(p.dist.name))
    for point in sorted(allowed, key=lambda p: p.name):
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
        raise ConfigError(f"{where}: there is no kind {kind!r}; known kinds: {', '.join(kinds)}")
