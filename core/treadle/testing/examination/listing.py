"""The table behind ``treadle plugin list``: every entry with its state, without importing any."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata

import msgspec

from treadle.errors import PluginConflictError, PluginNotFoundError
from treadle.plugins import PluginManager
from treadle.plugins.entries import Entry, normal
from treadle.testing.examination.findings import editable_folder

__all__ = ("Row", "editable", "rows", "unmet")


class Row(msgspec.Struct, frozen=True):
    """One line of the table; ``note`` says what a reader must know about the entry."""

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
    place = {name: position for position, name in enumerate(plugins.kinds)}
    about: dict[str, list[str]] = {}
    for entry in sorted(
        plugins.entries, key=lambda e: (place.get(e.kind, len(place)), e.kind, e.key, e.dist)
    ):
        if kind in (None, entry.kind):
            if entry.dist not in about:
                about[entry.dist] = [n for n in (unmet(entry.dist), editable(entry.dist)) if n]
            notes = [entry.why, *_standing(plugins, entry), *about[entry.dist]]
            note = "; ".join(n for n in notes if n)
            yield Row(
                entry.kind, entry.key, entry.dist, entry.version, entry.state, note, entry.target
            )


def _standing(plugins: PluginManager, entry: Entry) -> Iterator[str]:
    """How the entry fares against others that declare its key."""
    if entry.file is not None:
        yield f"local file {entry.file}"
    elif entry.override:
        yield "override"
    if not entry.usable or plugins.kinds[entry.kind].mode == "always":
        return
    try:
        chosen = plugins.choose(entry.kind, entry.key)
    except PluginConflictError:
        yield f"conflict: choose with --pin-plugin {entry.id}=DIST"
    except PluginNotFoundError:
        yield "the key is pinned to a distribution that is not there"
    else:
        if chosen is not entry:
            yield f"replaced by {chosen.dist}"
        elif entry.id in plugins.switches.pins:
            yield "pinned"


def unmet(dist: str) -> str:
    """Why a distribution does not want this core (``Requires-Dist``); ``""`` if it does."""
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        needs, ours = metadata.requires(dist) or [], metadata.version("treadle-core")
    except metadata.PackageNotFoundError:
        return ""
    for text in needs:
        try:
            need = Requirement(text)
        except InvalidRequirement:
            continue  # old metadata of something else it needs
        applies = normal(need.name) == "treadle-core" and (
            not need.marker or need.marker.evaluate()
        )
        if applies and not need.specifier.contains(ours, prereleases=True):
            return f"requires treadle-core {need.specifier}, installed is {ours}"
    return ""


def editable(dist: str) -> str:
    """``"editable"`` for a distribution that is installed from a folder under work."""
    return "editable" if editable_folder(dist) is not None else ""
