"""What is installed and who serves a key. Nothing here imports a plugin.

Pins come first, then overrides, plain entries and the fallback. Two candidates on one level are an
error where the key is asked for, so that an unrelated clash never stops an engine.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from treadle.api.plugin_kind import FALLBACK, PluginKind
from treadle.config import PluginConfig
from treadle.errors import ConfigError, PluginConflictError, PluginNotFoundError
from treadle.known_plugins import DISTRIBUTION_OF_KEY, install_hint
from treadle.plugin_lock import VERSION, Lock, LockedPlugin, check_lock
from treadle.plugins.entries import Entry, check_kind, normal, scan
from treadle.plugins.kinds import check_known, installed_kinds
from treadle.plugins.local import local_entries
from treadle.plugins.switches import Switches

__all__ = ("PluginRegistry", "PluginSelection", "Source")

log = logging.getLogger("treadle.plugins")
MAX_LISTED_KEYS = 24
CHECK_CODE = "treadle.testing.examination.integrity:check_code"  # reads all code of all plugins
Source = Callable[[], Iterable[Entry]]


class PluginSelection(msgspec.Struct, frozen=True, array_like=True):
    """Every selected plugin of one manager, not loaded yet. Travels to child processes as msgpack.

    A child process does not select again: it imports the named plugins, and refuses those that
    differ in its installation.
    """

    choices: list[Entry]

    def entries(self, installed: Source = scan) -> Iterator[Entry]:
        """Yield the selected entries; one whose plugin differs here is broken, with the reason."""
        files = {e.file for e in self.choices if e.file and Path(e.file).is_file()}
        candidates = chain(installed(), *map(local_entries, files))
        versions = {(normal(e.dist), e.source): e.version for e in candidates}
        for choice in self.choices:
            entry, version = choice.unloaded(), versions.get((normal(choice.dist), choice.source))
            if version != entry.version:
                installed_version = version or "none"
                entry.close(
                    "broken", f"the parent has {entry.owner}, this worker has {installed_version}"
                )
            yield entry


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
        source: Source | None = None,
        switches: Switches | None = None,
        kinds: Mapping[str, PluginKind[Any]] | None = None,
    ) -> None:
        self.config = config or PluginConfig()
        self.switches = switches or Switches.read(self.config)
        self.kinds = installed_kinds() if kinds is None else kinds
        self._source = source or scan
        self.resolved_entries: dict[tuple[str, str], Entry] = {}
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
        newer = {(e.id, e.dist) for e in entries if e.usable and not e.adapted}
        for entry in entries:
            if entry.adapted and (entry.id, entry.dist) in newer:
                entry.close("incompatible", "the distribution has it in a newer generation, too")
        return entries

    def check_lock(self) -> None:
        """Raise ``PluginConflictError`` if entries or code differ from the lock file of the options."""
        if self.config.plugin_lock_file is not None:
            check_lock(self.lock(), self.config.plugin_lock_file)
            EntryPoint("", CHECK_CODE, "").load()(self)

    def lock(self) -> Lock:
        """Return every usable entry, sorted by name so that files can be compared."""
        plugins = {
            LockedPlugin(
                e.id, normal(e.dist), e.version, e.generation or self.kinds[e.kind].generation
            )
            for e in self.entries
            if e.usable
        }
        return Lock(VERSION, sorted(plugins))

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
        if (kind, key) not in self.resolved_entries:
            self.kind(kind)
            dist = self.switches.pins.get(f"{kind}:{key}")
            entry = self._pinned_entry(kind, key, dist) if dist else self._owner(kind, key)
            self.resolved_entries[kind, key] = entry
        return self.resolved_entries[kind, key]

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
        owners = [e for e in self.entries if (e.kind, e.key) == (kind, key)]
        if unusable := [e for e in owners if not e.usable]:
            reasons = "; ".join(f"{e.owner} is {e.state}: {e.reason}" for e in unusable)
            return f"no plugin provides {kind}:{key} ({reasons})"
        keys = self.keys(kind)
        message = f"no plugin provides {kind}:{key} (known: {_abbreviate(keys, key)})"
        if matches := difflib.get_close_matches(key, keys, n=1):
            message += f"; did you mean {matches[0]!r}?"
        dist = DISTRIBUTION_OF_KEY.get(f"{kind}:{key}")
        if dist and normal(dist) not in {normal(e.dist) for e in self.entries}:
            return f"{message}; {install_hint(dist)}"
        return message

    def _usable(self, kind: str) -> list[Entry]:
        return [e for e in self.entries if e.kind == kind and e.usable]

    def _owner(self, kind: str, key: str) -> Entry:
        entries = [e for e in self._usable(kind) if e.key == key]
        entries = [e for e in entries if e.override] or entries
        if len(entries) == 1:
            return entries[0]
        if known := [e for e in entries if normal(e.dist) == DISTRIBUTION_OF_KEY.get(e.id)]:
            # Whoever claims a key of treadle's must not take it from users who asked for nothing.
            others = ", ".join(sorted(e.owner for e in entries if e not in known))
            text = "%s is provided by %s, and also by %s; --pin-plugin %s=DIST chooses another"
            log.warning(text, known[0].id, known[0].owner, others, known[0].id)
            return known[0]
        if entries:
            owners = ", ".join(sorted(e.owner for e in entries))
            raise PluginConflictError(
                f"{kind}:{key} is provided by {owners}; choose one with --pin-plugin {kind}:{key}=DIST"
            )
        if key != FALLBACK and any(e.key == FALLBACK for e in self._usable(kind)):
            return self.choose(kind, FALLBACK)
        raise PluginNotFoundError(self.missing(kind, key))

    def _pinned_entry(self, kind: str, key: str, dist: str) -> Entry:
        """A pin may also name the owner of the fallback, which then serves this key."""
        candidates = [e for e in self.entries if e.kind == kind and e.key in (key, FALLBACK)]
        entries = [e for e in candidates if normal(e.dist) == normal(dist)]
        for entry in sorted(entries, key=lambda e: (e.key == FALLBACK, not e.override)):
            if entry.usable:
                return entry
        if entries:
            raise PluginNotFoundError(
                f"{kind}:{key} is pinned to {dist}, which is {entries[0].state}: {entries[0].reason}"
            )
        distributions = ", ".join(sorted({e.dist for e in candidates if e.usable})) or "nobody"
        raise PluginNotFoundError(
            f"{kind}:{key} is pinned to {dist}, which does not provide it (provided by: {distributions}); "
            f"{install_hint(dist)}; or change --pin-plugin {kind}:{key}=DIST"
        )

    def _check_names(self) -> None:
        """Refuse options for plugins that are not there: a spelling mistake would be ignored."""
        for kind in self.config.plugin_time_budget:
            check_known(kind, self.kinds, "plugin_time_budget")
        entry_ids = {e.id for e in self.entries}
        for name in (*self.config.plugin_options, *self.config.isolate):
            option = "plugin_options" if name in self.config.plugin_options else "isolate"
            kind, _, key = name.partition(":")
            check_known(kind, self.kinds, f"{option} names {name!r}, write kind:key")
            served = {name} if option == "isolate" else {name, f"{kind}:{FALLBACK}"}
            if not key or not served & entry_ids:
                raise ConfigError(f"{option}: {self.missing(kind, key)}")
        known_names = entry_ids | {normal(e.dist) for e in self.entries}
        for name in self.config.disable_plugin:
            if (name if ":" in name else normal(name)) not in known_names:
                log.warning("--disable-plugin %s: nothing of that name is installed", name)


def _abbreviate(keys: Sequence[str], key: str) -> str:
    if len(keys) <= MAX_LISTED_KEYS:
        return ", ".join(keys) or "none"
    matches = difflib.get_close_matches(key, keys, n=5, cutoff=0.4) or list(keys[:5])
    return f"{', '.join(matches)} and {len(keys) - len(matches)} more"
