"""Who serves a key: pins first, then overrides, then plain entries, then the fallback of the kind.

Two candidates on one level are an error at resolution and not at listing, so that an unrelated
clash never stops an engine. The outcome never depends on the order of directories.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence

from treadle.errors import PluginConflictError, PluginNotFoundError
from treadle.known_plugins import KNOWN, install_hint
from treadle.plugins.entries import Entry, normal
from treadle.plugins.kinds import FALLBACK

__all__ = ("choose", "keys", "missing")

MANY_KEYS = 24


def choose(entries: Sequence[Entry], pins: Mapping[str, str], kind: str, key: str) -> Entry:
    """Return the one entry that serves ``kind:key``; it may be broken, never disabled.

    Raises ``PluginNotFoundError`` if nobody does and ``PluginConflictError`` if several do.
    """
    if dist := pins.get(f"{kind}:{key}"):
        return _pinned(entries, kind, key, dist)
    found = _best(e for e in entries if e.kind == kind and e.key == key and e.usable)
    if len(found) == 1:
        return found[0]
    if found:
        who = ", ".join(sorted(e.owner for e in found))
        raise PluginConflictError(
            f"{kind}:{key} is provided by {who}; choose one with --pin-plugin {kind}:{key}=DIST"
        )
    if key != FALLBACK and any(e.usable for e in entries if e.kind == kind and e.key == FALLBACK):
        return choose(entries, pins, kind, FALLBACK)
    raise PluginNotFoundError(missing(entries, kind, key))


def _pinned(entries: Iterable[Entry], kind: str, key: str, dist: str) -> Entry:
    """A pin may also name the owner of the fallback, which then serves this key."""
    able = [e for e in entries if e.kind == kind and e.key in (key, FALLBACK)]
    mine = [e for e in able if normal(e.dist) == normal(dist)]
    for entry in sorted(mine, key=lambda e: (e.key == FALLBACK, not e.override)):
        if entry.usable:
            return entry
    if mine:
        raise PluginNotFoundError(
            f"{kind}:{key} is pinned to {dist}, which is {mine[0].state}: {mine[0].why}"
        )
    others = ", ".join(sorted({e.dist for e in able if e.usable})) or "nobody"
    raise PluginNotFoundError(
        f"{kind}:{key} is pinned to {dist}, which does not provide it (provided by: {others}); "
        f"{install_hint(dist)}; or change --pin-plugin {kind}:{key}=DIST"
    )


def _best(candidates: Iterable[Entry]) -> list[Entry]:
    found = list(candidates)
    return [e for e in found if e.override] or found


def keys(entries: Iterable[Entry], kind: str) -> list[str]:
    """The usable keys of a kind, sorted, without the fallback."""
    return sorted({e.key for e in entries if e.kind == kind and e.usable and e.key != FALLBACK})


def missing(entries: Sequence[Entry], kind: str, key: str) -> str:
    """Why nobody serves a key, what is known instead, and what to install."""
    closed = [e for e in entries if e.kind == kind and e.key == key and not e.usable]
    if closed:
        reasons = "; ".join(f"{e.owner} is {e.state}: {e.why}" for e in closed)
        return f"no plugin provides {kind}:{key} ({reasons})"
    message = f"no plugin provides {kind}:{key} (known: {_some(keys(entries, kind), key)})"
    dist = KNOWN.get(f"{kind}:{key}")
    if dist and normal(dist) not in {normal(e.dist) for e in entries}:
        return f"{message}; {install_hint(dist)}"
    return message


def _some(known: Sequence[str], key: str) -> str:
    if len(known) <= MANY_KEYS:
        return ", ".join(known) or "none"
    near = difflib.get_close_matches(key, known, n=5, cutoff=0.4) or list(known[:5])
    return f"{', '.join(near)} and {len(known) - len(near)} more"
