"""The plugin manager of one engine: selects, imports and calls plugins.

Making one reads metadata and imports no plugin; extensions are imported by the first call. Methods
that load or call a plugin raise ``PluginNotFoundError`` (no plugin has the key),
``PluginConflictError`` (several have it), ``PluginLoadError`` (the plugin failed; the cause is
chained) and ``ConfigError`` (its options). A ``TreadleError`` raised by the plugin passes unchanged.
None of them belongs into the step loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec

from treadle.api.hookspecs import Options
from treadle.api.kinds import ATTENTION_BACKENDS, COMMUNICATORS, KERNEL_OPS
from treadle.api.plugin_kind import PluginKind
from treadle.config import PluginConfig
from treadle.errors import (
    ConfigError,
    PluginConflictError,
    PluginLoadError,
    PluginNotFoundError,
    TreadleError,
)
from treadle.plugins import offers, resolution
from treadle.plugins.boundary import wrap
from treadle.plugins.call_stats import CircuitBreaker, PluginCallStats
from treadle.plugins.entries import Entry, check_kind, normal, scan
from treadle.plugins.guard import PluginGuard
from treadle.plugins.hooks import PluginHooks
from treadle.plugins.kinds import FALLBACK, installed_kinds
from treadle.plugins.loader import PluginLoader, plugin_name
from treadle.plugins.local import local_entries
from treadle.plugins.lock import check_lock
from treadle.plugins.options import checked
from treadle.plugins.selection import PluginSelection, SelectedPlugin
from treadle.plugins.switches import Switches

if TYPE_CHECKING:
    from treadle.api import types as t
    from treadle.config import EngineConfig

__all__ = ("PluginManager",)

T = TypeVar("T")
Source = Callable[[], Iterable[Entry]]
log = logging.getLogger("treadle.plugins")


class PluginManager:
    """Owns the plugins of one engine. Never global: two engines have two managers.

    ``source`` replaces the scan of installed distributions, ``kinds`` the installed kinds.
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
        self.entries = self.declared()
        self._check_names()
        self.switches.apply(self.entries)
        self._check_lock()
        foreign = {plugin_name(e) for e in self.entries if e.kind not in self.kinds}
        self._loader = PluginLoader(self.kinds.values(), foreign)
        self._selected: dict[tuple[str, str], Entry] = {}
        self._extensions: list[Entry] | None = None
        self._configured: list[Entry] = []
        self._breakers: dict[str, CircuitBreaker] = {}
        self.call_stats = PluginCallStats(self.config.plugin_time_budget, self.kinds)

    @classmethod
    def from_selection(
        cls,
        selection: PluginSelection,
        config: PluginConfig | None = None,
        *,
        source: Source | None = None,
    ) -> Self:
        """Return the manager of a worker process, which refuses a different installation.

        The parent has applied pins and switches; this process's environment must not add its own.
        """
        config = msgspec.structs.replace(
            config or PluginConfig(),
            pin_plugin=[],
            disable_plugin=[],
            plugin_file=[],
            plugin_lock_file=None,
        )
        switches = Switches(strict=config.plugin_strict)
        return cls(config, source=lambda: selection.entries(source or scan), switches=switches)

    # ------------------------------------------------------------------------- selection

    def declared(self) -> list[Entry]:
        """Return every key that is declared now, installed or in a local file."""
        entries = list(self._source())
        for file in self.config.plugin_file:
            entries += local_entries(file)
        for entry in entries:
            check_kind(entry, self.kinds)
        return entries

    def kind(self, name: str) -> PluginKind[Any]:
        """Return a kind by name. Raises ``PluginNotFoundError`` if there is none."""
        if name not in self.kinds:
            raise PluginNotFoundError(
                f"there is no plugin kind {name!r}; known kinds: {', '.join(self.kinds)}"
            )
        return self.kinds[name]

    def keys(self, kind: str) -> list[str]:
        """Return the usable keys of a kind, sorted, without the fallback ``*``."""
        return resolution.keys(self.entries, kind)

    def choose(self, kind: str, key: str) -> Entry:
        """Return the entry that serves ``kind:key``. Imports nothing."""
        if (kind, key) not in self._selected:
            self.kind(kind)
            entry = resolution.choose(self.entries, self.switches.pins, kind, key)
            self._selected[kind, key] = entry
        return self._selected[kind, key]

    def load(self, kind: str, key: str) -> object:
        """Import the plugin that serves ``kind:key`` and return it."""
        return self._loader.load(self.choose(kind, key))

    def options(self, kind: str, key: str) -> Options:
        """Return the checked options of the plugin that serves ``kind:key``."""
        return self._options(self.choose(kind, key), key)

    def selection(self) -> PluginSelection:
        """Return what serves each key, for a worker process. Imports nothing.

        Contested keys that are not pinned are all in it, so that a worker meets the same conflict.
        """
        names = {(e.kind, e.key) for e in self.entries if e.usable}
        pinned = (name.partition(":") for name in self.switches.pins)
        selected: list[SelectedPlugin] = []
        for kind, key in sorted(names | {(kind, key) for kind, _, key in pinned}):
            try:
                owners = [self.choose(kind, key)]
            except PluginConflictError:
                owners = [e for e in self.entries if (e.kind, e.key) == (kind, key) and e.usable]
            except PluginNotFoundError:
                continue  # a pin to something that is not installed: the key cannot be used
            selected += [SelectedPlugin.of(entry, kind, key) for entry in owners]
        return PluginSelection(selected)

    def with_replaced(self, old: Collection[Entry], new: Collection[Entry]) -> Self:
        """Return another manager with ``new`` instead of ``old``, which shares everything else.

        Raises ``PluginConflictError`` if the lock file does not allow ``new``.
        """
        other = copy(self)
        removed = set(map(id, old))
        other.entries = [*(e for e in self.entries if id(e) not in removed), *new]
        self.switches.apply(new)
        other._check_lock()
        other._loader = self._loader.copy_without(old)
        other._selected = {}
        return other

    # --------------------------------------------------------------------------- calling

    def create(self, kind: PluginKind[T], key: str, **arguments: Any) -> T:
        """Call the hook of ``kind`` for ``key`` and return what it builds, as it is.

        ``arguments`` are those of the hook, without the key and ``options``.
        """
        arguments |= {kind.key_argument: key, "options": self.options(kind.name, key)}
        built: T | None = self.hooks_for(kind.name, key).call(kind.hook, arguments)
        if built is not None:
            return built
        entry = self.choose(kind.name, key)
        if entry.key == FALLBACK and key != FALLBACK:
            reason = resolution.missing(self.entries, kind.name, key)
            raise PluginNotFoundError(
                f"{reason}; the fallback of {entry.owner} cannot serve it either"
            )
        raise PluginLoadError(
            f"{kind.name}:{key} is declared by {entry.owner}, but its {kind.hook} returned None; "
            "report this to its authors"
        )

    def create_guarded(self, kind: PluginKind[T], key: str, **arguments: Any) -> T:
        """Return what ``create`` returns, behind the boundary that the kind declares."""
        return self.guarded(kind, key, self.create(kind, key, **arguments))

    def guarded(self, kind: PluginKind[T], key: str, built: T) -> T:
        """Return ``built``, which the plugin of ``key`` has built, behind the boundary."""
        wrapped: T = wrap(built, kind, self.boundary_guard(kind, self.choose(kind.name, key)))
        return wrapped

    def guard(self, kind: PluginKind[Any], key: str) -> PluginGuard:
        """Return what attributes failures to the plugin that serves ``key``."""
        return PluginGuard(self.choose(kind.name, key), self.call_stats, kind.error)

    def boundary_guard(self, kind: PluginKind[Any], entry: Entry) -> PluginGuard:
        """Return the guard of a boundary, where a failure costs what the kind and the mode say."""
        breaker = self._breaker(entry) if kind.failure == "itself" else None
        fatal = self.switches.strict and kind.failure == "request"
        return PluginGuard(entry, self.call_stats, kind.error, breaker=breaker, fatal=fatal)

    def hooks_for(self, kind: str, key: str) -> PluginHooks:
        """Return the hooks of the plugin that serves a key, wrapped by the extensions."""
        return self._hooks(self.choose(kind, key))

    def offers(self, kind: PluginKind[T], **arguments: Any) -> tuple[list[T], list[t.Refusal]]:
        """Return the offers of all backends, the best first, and their refusals."""
        return offers.all_offers(self, kind, **arguments)

    def attention_offer(
        self, request: t.AttentionRequest, pin: str | None = None
    ) -> t.AttentionOffer:
        """Return the best offer, or that of the backend ``pin``, behind the boundary.

        Raises ``PluginNotFoundError`` with every refusal if there is none, ``ConfigError`` if the
        pinned backend refuses.
        """
        if pin is not None:
            return offers.pinned_offer(self, ATTENTION_BACKENDS, pin, request=request)
        return offers.required_offer(self, ATTENTION_BACKENDS, request=request)

    def kernel(self, op: str, request: t.KernelRequest) -> t.KernelOffer | None:
        """Return the best offer for one operation behind the boundary; ``None`` if there is none."""
        return offers.best_offer(self, KERNEL_OPS, op=op, request=request)

    def communicator(self, request: t.CommunicatorRequest) -> t.CommunicatorOffer | None:
        """Return the best offer behind the boundary; ``None`` if there is none."""
        return offers.best_offer(self, COMMUNICATORS, request=request)

    def call_all(self, kind: PluginKind[Any], **arguments: Any) -> list[Any]:
        """Call all plugins of an ``always`` kind in name order; return the answers.

        ``options`` are added for each of them. Broken plugins are left out.
        """
        answers: list[Any] = []
        for entry in self._loadable(kind.name):
            arguments["options"] = self._options(entry, entry.key)
            answer = self._hooks(entry).call(kind.hook, arguments)
            answers += answer if isinstance(answer, list) else [answer]
        return [answer for answer in answers if answer is not None]

    @contextmanager
    def calls(self) -> Iterator[list[str]]:
        """Collect the names of the hooks that are called inside the block."""
        called: list[str] = []
        undo = self._loader.pm.add_hookcall_monitoring(
            before=lambda name, impls, arguments: called.append(name),
            after=lambda outcome, name, impls, arguments: None,
        )
        try:
            yield called
        finally:
            undo()

    def hooks_of(self, plugin: object) -> tuple[list[str], list[str]]:
        """Return the names of the hooks that a loaded plugin implements, and of those it wraps."""
        plain: list[str] = []
        wrapped: list[str] = []
        for caller in self._loader.pm.get_hookcallers(plugin) or []:
            for found in caller.get_hookimpls():
                if found.plugin is plugin:
                    wraps = found.wrapper or found.hookwrapper
                    (wrapped if wraps else plain).append(caller.name)
        return sorted(plain), sorted(wrapped)

    def states(self) -> dict[str, str]:
        """Return the state of every plugin that was imported, by ``kind:key``."""
        return {e.id: e.state for e in self.entries if e.state in ("loaded", "broken")}

    # ------------------------------------------------------------------------ extensions

    def configure(self, config: EngineConfig) -> None:
        """Call ``treadle_configure`` of the extensions, in name order.

        If one fails, those before it are unconfigured and ``PluginLoadError`` is raised.
        """
        for entry in self._started_extensions():
            try:
                self._hooks(entry, wrapped=False).treadle_configure(config=config)
            except Exception:
                self.unconfigure()
                raise
            self._configured.append(entry)

    def unconfigure(self) -> None:
        """Let the configured extensions release their resources. Failures are logged."""
        while self._configured:
            entry = self._configured.pop()
            try:
                self._hooks(entry, wrapped=False).treadle_unconfigure()
            except Exception as error:  # the others must still be released
                log.error("%s", error, exc_info=error)

    def report(self) -> list[str]:
        """Return the lines that loaded plugins add to ``treadle doctor``."""
        lines: list[str] = []
        reported: set[int] = set()
        self._started_extensions()
        for entry in sorted(self.entries, key=lambda e: (e.dist, e.id)):
            if entry.state != "loaded" or id(self._loader.load(entry)) in reported:
                continue
            reported.add(id(self._loader.load(entry)))
            try:
                texts = self._hooks(entry, wrapped=False).treadle_report()
                lines += [f"{entry.owner}: {text}" for text in texts]
            except TreadleError as error:
                lines.append(f"{entry.owner}: treadle_report failed: {error}")
        return lines

    def _started_extensions(self) -> list[Entry]:
        """Return the loaded extensions. The first call imports them, in strict mode everything."""
        if self._extensions is None:
            if self.switches.strict:
                self._load_everything()
            self._extensions = self._loadable("extensions")
        return [e for e in self._extensions if e.state == "loaded"]

    # ------------------------------------------------------------------------ internals

    def _hooks(self, entry: Entry, *, wrapped: bool = True) -> PluginHooks:
        extensions = self._started_extensions() if wrapped else []
        wrappers = [(self._loader.load(e), self._breaker(e)) for e in extensions if e is not entry]
        repeatable = self.kinds[entry.kind].mode != "always"
        return PluginHooks(self._loader, entry, self.call_stats, wrappers, repeatable=repeatable)

    def _breaker(self, entry: Entry) -> CircuitBreaker:
        """Return the circuit breaker of a plugin, the same for all its hooks and methods."""
        if entry.id not in self._breakers:
            strict = self.switches.strict
            self._breakers[entry.id] = CircuitBreaker(entry, self.call_stats, strict=strict)
        return self._breakers[entry.id]

    def _options(self, entry: Entry, key: str) -> Options:
        table = self.config.plugin_options
        given = table.get(f"{entry.kind}:{key}", table.get(entry.id, {}))
        return checked(self._loader.load(entry), entry.kind, key, given)

    def _loadable(self, kind: str) -> list[Entry]:
        """Load the entries of an ``always`` kind; return them in name order without broken ones."""
        loaded: list[Entry] = []
        for entry in sorted(self.entries, key=lambda e: (e.key, e.dist)):
            if entry.kind == kind and entry.usable:
                try:
                    self._loader.load(entry)
                except PluginLoadError as error:
                    if self.switches.strict:
                        raise
                    log.warning("%s; treadle goes on without it", error)
                else:
                    loaded.append(entry)
        return loaded

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

    def _check_lock(self) -> None:
        if self.config.plugin_lock_file is not None:
            check_lock(self.entries, Path(self.config.plugin_lock_file))

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
                raise ConfigError(f"plugin_options: {resolution.missing(self.entries, kind, key)}")
        present = declared | {normal(e.dist) for e in self.entries}
        for name in self.config.disable_plugin:
            if (name if ":" in name else normal(name)) not in present:
                log.warning("--disable-plugin %s: nothing of that name is installed", name)
