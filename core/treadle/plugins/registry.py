"""Choosing and calling: what the typed methods of the host are made of."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any, Self, TypeVar, cast

from treadle.api.hookspecs import First, Options
from treadle.config import PluginConfig
from treadle.errors import (
    ConfigError,
    PluginConflictError,
    PluginLoadError,
    PluginNotFoundError,
    TreadleError,
)
from treadle.plugins import lock
from treadle.plugins import resolution as choice
from treadle.plugins.call_stats import Breaker, Tally, budgets
from treadle.plugins.entries import Entry, normal, scan
from treadle.plugins.guard import Guard
from treadle.plugins.kinds import FALLBACK, KINDS
from treadle.plugins.loader import Loader, Relay
from treadle.plugins.local import local_entries
from treadle.plugins.options import checked
from treadle.plugins.selection import Choice, Plan
from treadle.plugins.switches import Switches

__all__ = ("Registry",)

T = TypeVar("T")
Source = Callable[[], Iterable[Entry]]
log = logging.getLogger("treadle.plugins")


class Registry:
    """Every declared plugin, its state, and the way to its hooks.

    Making one reads metadata and imports no plugin; extensions are imported by the first call.
    ``source`` replaces the scan of installed distributions (tests, plans).
    """

    def __init__(
        self,
        config: PluginConfig | None = None,
        *,
        source: Source | None = None,
        switches: Switches | None = None,
    ) -> None:
        self.config = config or PluginConfig()
        self.switches = switches or Switches.read(self.config)
        self._source = source or scan
        self.entries = self.declared()
        self._check_names()
        self.switches.apply(self.entries)
        if self.config.locked is not None:
            lock.check(self, Path(self.config.locked))
        self._loader = Loader()
        self._chosen: dict[tuple[str, str], Entry] = {}
        self._extensions: list[Entry] | None = None
        self._configured: list[Entry] = []
        self._breakers: dict[str, Breaker] = {}
        self.bidders: dict[tuple[str, str], Entry] = {}
        """By kind and name, who bids under a name, which need not be its key."""
        self.tally = Tally(budgets(self.config.plugin_time_budget))
        """What calls of hooks, and of the methods of guarded objects, came to."""

    def declared(self) -> list[Entry]:
        """Every key as it is declared now, be it installed or in a local file."""
        found = list(self._source())
        for file in self.config.plugin_file:
            found += local_entries(file)
        return found

    def exchanged(self, old: Collection[Entry], new: Collection[Entry]) -> Self:
        """Another registry in which ``new`` stands for ``old``. This one stays as it is, and all
        else is shared: what is loaded, the counts, the breakers.

        Raises ``PluginConflictError`` if the lock file does not allow ``new``.
        """
        other = copy(self)
        gone = set(map(id, old))
        other.entries = [*(e for e in self.entries if id(e) not in gone), *new]
        self.switches.apply(new)
        if self.config.locked is not None:
            lock.check(other, Path(self.config.locked))
        other._loader = self._loader.without(old)
        other._chosen = {}
        return other

    # -- asking ----------------------------------------------------------------------

    def keys(self, kind: str) -> list[str]:
        """The usable keys of a kind, sorted, without the fallback ``*``."""
        return choice.keys(self.entries, kind)

    def choose(self, kind: str, key: str) -> Entry:
        """The entry that serves ``kind:key``. Imports nothing."""
        if (kind, key) not in self._chosen:
            found = choice.choose(self.entries, self.switches.pins, kind, key)
            self._chosen[kind, key] = found
        return self._chosen[kind, key]

    def load(self, kind: str, key: str) -> object:
        """Import the plugin that serves ``kind:key`` and return it."""
        return self._loader.load(self.choose(kind, key))

    def options(self, kind: str, key: str) -> Options:
        """The checked options of the plugin that serves ``kind:key``."""
        entry = self.choose(kind, key)
        table = self.config.plugin_options
        given = table.get(f"{kind}:{key}", table.get(entry.id, {}))
        return checked(self._loader.load(entry), kind, key, given)

    def plan(self) -> Plan:
        """Every choice as it stands, for a worker process. Imports nothing.

        Contested keys that nobody pinned are all in it, so that a worker meets the same conflict.
        """
        choices: list[Choice] = []
        for kind, key in sorted(self._askable()):
            try:
                winners = [self.choose(kind, key)]
            except PluginConflictError:
                winners = [e for e in self.entries if (e.kind, e.key) == (kind, key) and e.usable]
            except PluginNotFoundError:
                continue  # a pin to something that is not there: nobody can use the key
            choices += [Choice.of(entry, kind, key) for entry in winners]
        return Plan(choices=choices)

    def _askable(self) -> set[tuple[str, str]]:
        names = {(e.kind, e.key) for e in self.entries if e.usable}
        pinned = (name.partition(":") for name in self.switches.pins)
        return names | {(kind, key) for kind, _, key in pinned}

    # -- calling ---------------------------------------------------------------------

    def only(self, kind: str, key: str) -> First:
        """The hooks of the one plugin chosen for a key, with the extensions around it."""
        return cast("First", self._relay(self.choose(kind, key)))

    def first(self, kind: str, key: str, hook: str, **arguments: Any) -> Any:
        """Call a hook that another distribution added, with ``options``; its answer is never None."""
        found = getattr(self.only(kind, key), hook)(**arguments, options=self.options(kind, key))
        return self.answered(kind, key, found)

    def every(self, kind: str, hook: str, **arguments: Any) -> list[Any]:
        """Call ``hook`` of all plugins of an ``always`` kind in name order; the answers that came.

        ``options`` are added for each of them.
        """
        answers: list[Any] = []
        for entry in self._all(kind):
            found = getattr(self._relay(entry), hook)(**arguments, options=self._own_options(entry))
            answers += found if isinstance(found, list) else [found]
        return [answer for answer in answers if answer is not None]

    def add_hookspecs(self, specs: type) -> None:
        """Add the hooks of another distribution (``treadle.server``, ``treadle.commands``)."""
        self._loader.pm.add_hookspecs(specs)

    @contextmanager
    def calls(self) -> Iterator[list[str]]:
        """Collect the names of the hooks that are called inside the block.

        ::

            with host.calls() as fired:
                engine.step()
            assert fired == []
        """
        fired: list[str] = []
        undo = self._loader.pm.add_hookcall_monitoring(
            before=lambda name, impls, arguments: fired.append(name),
            after=lambda outcome, name, impls, arguments: None,
        )
        try:
            yield fired
        finally:
            undo()

    def hooks_of(self, plugin: object) -> tuple[list[str], list[str]]:
        """The names of the hooks that a loaded plugin answers, and of those it wraps."""
        plain: list[str] = []
        wrappers: list[str] = []
        for caller in self._loader.pm.get_hookcallers(plugin) or []:
            for found in caller.get_hookimpls():
                if found.plugin is plugin:
                    wraps = found.wrapper or found.hookwrapper
                    (wrappers if wraps else plain).append(caller.name)
        return sorted(plain), sorted(wrappers)

    def answered(self, kind: str, key: str, found: T | None) -> T:
        """``found``, or the error that tells why there is nothing."""
        if found is not None:
            return found
        entry = self.choose(kind, key)
        if entry.key == FALLBACK and key != FALLBACK:
            reason = choice.missing(self.entries, kind, key)
            raise PluginNotFoundError(
                f"{reason}; the fallback of {entry.owner} cannot serve it either"
            )
        raise PluginLoadError(
            f"{kind}:{key} is declared by {entry.owner}, but its {KINDS[kind].hook} returned None; "
            "report this to its authors"
        )

    def guard(self, kind: str, key: str, error: type[TreadleError] = PluginLoadError) -> Guard:
        """What calls the objects that the plugin of a key, or the bidder of that name, has built;
        it raises ``error``."""
        entry = self.bidders.get((kind, key)) or self.choose(kind, key)
        return Guard(entry, self.tally, error)

    def _relay(self, entry: Entry) -> Relay:
        around = [(self._loader.load(e), self._breaker(e)) for e in self._start() if e is not entry]
        return Relay(self._loader, entry, around, self.tally)

    def _breaker(self, entry: Entry) -> Breaker:
        """One for each extension, whatever hook it fails in."""
        if entry.id not in self._breakers:
            breaker = Breaker(entry, self.tally, strict=self.switches.strict)
            self._breakers[entry.id] = breaker
        return self._breakers[entry.id]

    def _alone(self, entry: Entry) -> Any:
        """The hooks of one entry with nothing around it."""
        return Relay(self._loader, entry, tally=self.tally)

    def _all(self, kind: str) -> list[Entry]:
        """The entries of an ``always`` kind in name order, loaded; broken ones are left out."""
        found: list[Entry] = []
        for entry in sorted(self.entries, key=lambda e: (e.key, e.dist)):
            if entry.kind == kind and entry.usable and self._loads(entry):
                found.append(entry)
        return found

    def _loads(self, entry: Entry) -> bool:
        try:
            self._loader.load(entry)
        except PluginLoadError as error:
            if self.switches.strict:
                raise
            log.warning("%s; treadle goes on without it", error)
            return False
        return True

    def _start(self) -> list[Entry]:
        """The loaded extensions. The first call imports them, in strict mode everything."""
        if self._extensions is None:
            if self.switches.strict:
                self._load_everything()
            self._extensions = self._all("extensions")
        return [e for e in self._extensions if e.state == "loaded"]

    def states(self) -> dict[str, str]:
        """The state of every plugin that was imported, by ``kind:key``."""
        return {e.id: e.state for e in self.entries if e.state in ("loaded", "broken")}

    def _load_everything(self) -> None:
        problems: list[str] = []
        for entry in self.entries:
            if entry.usable:
                try:
                    self._loader.load(entry)
                except PluginLoadError as error:
                    problems.append(str(error))
        if problems:
            raise PluginLoadError(
                "strict mode, and plugins are broken:\n  " + "\n  ".join(problems)
            )

    def _own_options(self, entry: Entry) -> Mapping[str, Any]:
        given = self.config.plugin_options.get(entry.id, {})
        return checked(self._loader.load(entry), entry.kind, entry.key, given)

    def _check_names(self) -> None:
        """Options for a plugin that is not there would be ignored, a spelling mistake with them."""
        declared = {e.id for e in self.entries}
        for name in self.config.plugin_options:
            kind, _, key = name.partition(":")
            if kind not in KINDS or not key:
                raise ConfigError(
                    f"plugin_options names {name!r}; write kind:key with a kind of: {', '.join(KINDS)}"
                )
            if name not in declared and f"{kind}:{FALLBACK}" not in declared:
                raise ConfigError(f"plugin_options: {choice.missing(self.entries, kind, key)}")
        present = declared | {normal(e.dist) for e in self.entries}
        for name in self.config.no_plugin:
            if (name if ":" in name else normal(name)) not in present:
                log.warning("--no-plugin %s: nothing of that name is installed", name)
