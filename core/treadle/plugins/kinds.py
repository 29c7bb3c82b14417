"""Which kinds of plugins are installed, and the names of their entry-point groups."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from types import MappingProxyType
from typing import Any

from treadle.api.hookspecs import PROJECT
from treadle.api.kinds import CORE_KINDS
from treadle.api.plugin_kind import PluginKind

__all__ = ("FALLBACK", "OVERRIDES", "installed_kinds", "parse_group")

log = logging.getLogger("treadle.plugins")

FALLBACK = "*"
"""The key that serves every key of its kind that no other plugin declares."""

OVERRIDES = "overrides"
"""The group whose entries are named ``kind.key`` and replace the plain owner of that key."""

DECLARATIONS = f"{PROJECT}.kinds"
_GROUP = re.compile(rf"{PROJECT}\.([a-z_]+)(?:\.v([1-9][0-9]*))?")


@cache
def installed_kinds() -> Mapping[str, PluginKind[Any]]:
    """Return every kind by name: the core's, then those of other installed distributions."""
    kinds = {kind.name: kind for kind in CORE_KINDS}
    for point in sorted(metadata.entry_points(group=DECLARATIONS), key=lambda p: p.name):
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


def parse_group(group: str) -> tuple[str, int] | None:
    """Return ``("models", 2)`` for ``treadle.models.v2``, ``None`` for a group without plugins."""
    if group == DECLARATIONS or not group.startswith(f"{PROJECT}."):
        return None
    if match := _GROUP.fullmatch(group):
        return match[1], int(match[2] or 1)
    return group.removeprefix(f"{PROJECT}."), 0
