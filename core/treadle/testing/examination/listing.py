"""The table behind ``treadle plugin list``: every entry with its state, without importing any."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import metadata

import msgspec

from treadle.errors import PluginConflictError, PluginNotFoundError
from treadle.plugins import PluginManager
from treadle.plugins.entries import Entry, normal
from treadle.testing.examination.findings import editable_folder, loses_to, requirement_findings

__all__ = ("UNMET", "Row", "editable", "rows", "unmet_requirement")

UNMET = "unmet"
"""The state of a plugin whose distribution needs another that is not installed."""


class Row(msgspec.Struct, frozen=True):
    """One line of the table; ``note`` explains the state."""

    kind: str
    key: str
    distribution: str
    version: str
    state: str
    note: str
    target: str


def rows(plugins: PluginManager, kind: str | None = None) -> Iterator[Row]:
    """Yield every entry, by kind and key. Raises ``PluginNotFoundError`` for an unknown kind."""
    if kind is not None:
        plugins.kind(kind)
    order = {name: position for position, name in enumerate(plugins.kinds)}
    dist_notes: dict[str, list[str]] = {}
    unmet_dists: set[str] = set()
    version = cache(metadata.version)  # most plugins require the same few distributions
    for entry in sorted(
        plugins.entries, key=lambda e: (order.get(e.kind, len(order)), e.kind, e.key, e.dist)
    ):
        if kind in (None, entry.kind):
            if entry.dist not in dist_notes:
                missing = [
                    finding.text
                    for finding in requirement_findings(entry.dist, version)
                    if finding.code == "dependency"
                ]
                if missing:
                    unmet_dists.add(entry.dist)
                notes = [*missing, unmet_requirement(entry.dist), editable(entry.dist)]
                dist_notes[entry.dist] = [n for n in notes if n]
            notes = [entry.reason, *_owner_notes(plugins, entry), *dist_notes[entry.dist]]
            note = "; ".join(n for n in notes if n)
            state: str = entry.state
            if state == "ready" and entry.dist in unmet_dists:
                state = UNMET
            yield Row(entry.kind, entry.key, entry.dist, entry.version, state, note, entry.target)


def _owner_notes(plugins: PluginManager, entry: Entry) -> Iterator[str]:
    """Yield notes on an override, a pin or a conflict of the entry with others of its key."""
    if entry.file is not None:
        yield f"local file {entry.file}"
    elif entry.override:
        yield "override"
    if entry.plugin in plugins.loader.isolated:
        yield "isolated"
    if not entry.usable or plugins.kinds[entry.kind].mode == "always":
        return
    try:
        owner = plugins.choose(entry.kind, entry.key)
    except PluginConflictError:
        yield f"conflict: choose with --pin-plugin {entry.id}=DIST"
    except PluginNotFoundError:
        yield "the key is pinned to a distribution that is not installed"
    else:
        if loses_to(entry, owner, plugins):
            yield f"conflict: {owner.dist} is used; --pin-plugin {entry.id}={entry.dist} uses this one"
        elif owner is not entry:
            yield f"replaced by {owner.dist}"
        elif entry.id in plugins.switches.pins:
            yield "pinned"


def unmet_requirement(dist: str) -> str:
    """Return why ``Requires-Dist`` of a distribution excludes this core; ``""`` if it does not."""
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        requirements, core_version = metadata.requires(dist) or [], metadata.version("treadle-core")
    except (metadata.PackageNotFoundError, UnicodeDecodeError):
        return ""
    for text in requirements:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue  # old metadata of something else it needs
        applies = normal(requirement.name) == "treadle-core" and (
            not requirement.marker or requirement.marker.evaluate()
        )
        if applies and not requirement.specifier.contains(core_version, prereleases=True):
            return f"requires treadle-core {requirement.specifier}, installed is {core_version}"
    return ""


def editable(dist: str) -> str:
    """Return ``"editable"`` for a distribution that is installed in editable mode, else ``""``."""
    return "editable" if editable_folder(dist) is not None else ""
