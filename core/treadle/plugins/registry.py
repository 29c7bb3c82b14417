"""What is installed and who serves a key. Nothing here imports a plugin.

Pins come first, then overrides, then plain entries, then the fallback of the kind. Two candidates on
one level are an error where the key is asked for and not where it is listed, so that an unrelated
clash never stops an engine. The outcome never depends on the order of directories.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from treadle.api.plugin_kind import PluginKind
from treadle.config import PluginConfig
from treadle.errors import ConfigError, PluginConflictError, PluginNotFoundError
from treadle.known_plugins import KNOWN, install_hint
from treadle.plugins.entries import Entry, check_kind, normal, scan
from treadle.plugins.kinds import FALLBACK, installed_kinds
from treadle.plugins.local import local_entries
from treadle.plugins.selection import PluginSelection, check_lock
from treadle.plugins.switches import Switches

__all__ = ("PluginRegistry",)

log = logging.getLogger("treadle.plugins")
MANY_KEYS = 24


class PluginRegistry:
    """The entries of one engine, those that the user switched off closed.

    ``source`` replaces the scan of installed distributions, ``kinds`` the installed kinds. Raises
    ``ConfigError`` for options that name nothing, and ``PluginConflictError`` if the plugins differ
    from the lock file.
    """

    def __init__(
        self,
        config: PluginConfig | None = None,
        *,
        source: Callable[[], Iterable[Entry]] | None = None,
        switches: Switches | None = None,
        kinds: Mapping[str, PluginKind[Any]] | None = None,
    ) -> None:
        self.config = config or PluginConfig()
        self.switches = switches or Switches.read(self.config)
        self.kinds = installed_kinds() if kinds is None else kinds
        self._source = source or scan
        self.chosen: dict[tuple[str, str], Entry] = {}
        """Who serves a key, as far as that was asked."""
        self.entries = self.declared()
        self._check_names()
        self.switches.apply(self.entries)
        self.check_lock()

    def declared(self) -> list[Entry]:
        """Return every key that is declared now, installed or in a local file."""
        entries = list(self._source())
        for file in self.config.plugin_file:
            entries += local_entries(file)
        for entry in entries:
            check_kind(entry, self.kinds)
        return entries

    def check_lock(self) -> None:
        """Raise ``PluginConflictError`` if the entries differ from the lock file of the options."""
        if self.config.plugin_lock_file is not None:
            check_lock(self.entries, self.config.plugin_lock_file)

    def kind(self, name: str) -> PluginKind[Any]:
        """Return a kind by name. Raises ``PluginNotFoundError`` if there is none."""
        if name not in self.kinds:
            raise PluginNotFoundError(
                f"there is no plugin kind {name!r}; known kinds: {', '.join(self.kinds)}"
            )
        return self.kinds[name]

    def keys(self, kind: str) -> list[str]:
        """Return the usable keys of a kind, sorted, without the fallback ``*``."""
        return sorted({e.key for e in self._usable(kind) if e.key != FALLBACK})

    def choose(self, kind: str, key: str) -> Entry:
        """Return the one entry that serves ``kind:key``; it may be broken, never disabled.

        Raises ``PluginNotFoundError`` if nobody does and ``PluginConflictError`` if several do.
        """
        if (kind, key) not in self.chosen:
            self.kind(kind)
            dist = self.switches.pins.get(f"{kind}:{key}")
            entry = self._pinned(kind, key, dist) if dist else self._owner(kind, key)
            self.chosen[kind, key] = entry
        return self.chosen[kind, key]

    def selection(self) -> PluginSelection:
        """Return what serves each key, for a worker process.

        Contested keys that are not pinned are all in it, so that a worker meets the same conflict.
        """
        names = {(e.kind, e.key) for e in self.entries if e.usable}
        pinned = (name.partition(":") for name in self.switches.pins)
        selected: list[Entry] = []
        for kind, key in sorted(names | {(kind, key) for kind, _, key in pinned}):
            try:
                owners = [self.choose(kind, key)]
            except PluginConflictError:
                owners = [e for e in self._usable(kind) if e.key == key]
            except PluginNotFoundError:
                continue  # a pin to something that is not installed: the key cannot be used
            selected += [entry.unloaded(key) for entry in owners]
        return PluginSelection(selected)

    def missing(self, kind: str, key: str) -> str:
        """Say why nobody serves a key, what is known instead, and what to install."""
        closed = [e for e in self.entries if (e.kind, e.key) == (kind, key) and not e.usable]
        if closed:
            reasons = "; ".join(f"{e.owner} is {e.state}: {e.why}" for e in closed)
            return f"no plugin provides {kind}:{key} ({reasons})"
        message = f"no plugin provides {kind}:{key} (known: {_some(self.keys(kind), key)})"
        dist = KNOWN.get(f"{kind}:{key}")
        if dist and normal(dist) not in {normal(e.dist) for e in self.entries}:
            return f"{message}; {install_hint(dist)}"
        return message

    def _usable(self, kind: str) -> list[Entry]:
        return [e for e in self.entries if e.kind == kind and e.usable]

    def _owner(self, kind: str, key: str) -> Entry:
        found = [e for e in self._usable(kind) if e.key == key]
        found = [e for e in found if e.override] or found
        if len(found) == 1:
            return found[0]
        if found:
            who = ", ".join(sorted(e.owner for e in found))
            raise PluginConflictError(
                f"{kind}:{key} is provided by {who}; choose one with --pin-plugin {kind}:{key}=DIST"
            )
        if key != FALLBACK and any(e.key == FALLBACK for e in self._usable(kind)):
            return self.choose(kind, FALLBACK)
        raise PluginNotFoundError(self.missing(kind, key))

    def _pinned(self, kind: str, key: str, dist: str) -> Entry:
        """A pin may also name the owner of the fallback, which then serves this key."""
        able = [e for e in self.entries if e.kind == kind and e.key in (key, FALLBACK)]
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

    def _check_names(self) -> None:
        """Refuse options for plugins that are not there: a spelling mistake would be ignored."""
        declared = {e.id for e in self.entries}
        for name in self.config.plugin_options:
            kind, _, key = name.partition(":")
            if kind not in self.kinds or not key:
                raise ConfigError(
                    f"plugin_options names {name!r}; write kind:key with a kind of: "
                    f"{', '.join(self.kinds)}"
                )
            if name not in declared and f"{kind}:{FALLBACK}" not in declared:
                raise ConfigError(f"plugin_options: {self.missing(kind, key)}")
        present = declared | {normal(e.dist) for e in self.entries}
        for name in self.config.disable_plugin:
            if (name if ":" in name else normal(name)) not in present:
                log.warning("--disable-plugin %s: nothing of that name is installed", name)


def _some(known: Sequence[str], key: str) -> str:
    if len(known) <= MANY_KEYS:
        return ", ".join(known) or "none"
    near = difflib.get_close_matches(key, known, n=5, cutoff=0.4) or list(known[:5])
    return f"{', '.join(near)} and {len(known) - len(near)} more"
