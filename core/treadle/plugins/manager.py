"""The plugin manager of one engine: selects, imports and calls plugins.

Making one imports no plugin. Methods that load or call one raise ``PluginNotFoundError``,
``PluginConflictError`` (several have the key), ``PluginLoadError`` (it failed; the cause is chained) and
``ConfigError`` (its options). A ``TreadleError`` of the plugin passes. None belongs into the step loop.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, Self, TypeVar

import msgspec

from treadle.api.hookspecs import Options
from treadle.api.kinds import EXTENSIONS
from treadle.api.plugin_kind import FALLBACK, PluginKind
from treadle.api.plugin_options import check_options
from treadle.api.result_checks import is_offer
from treadle.api.types import Refusal
from treadle.config import PluginConfig
from treadle.errors import PluginConflictError, PluginLoadError, PluginNotFoundError
from treadle.plugins.boundary import wrap
from treadle.plugins.call_stats import PluginCallStats
from treadle.plugins.entries import Entry, scan
from treadle.plugins.guard import PluginGuard
from treadle.plugins.hooks import PluginHooks
from treadle.plugins.loader import PluginLoader
from treadle.plugins.registry import PluginRegistry, PluginSelection, Source
from treadle.plugins.switches import Switches

__all__ = ("PluginManager",)

T = TypeVar("T")
log = logging.getLogger("treadle.plugins")


class PluginManager(PluginRegistry):
    """Owns the plugins of one engine. Never global: two engines have two managers."""

    def __init__(self, config: PluginConfig | None = None, **parts: Any) -> None:
        """``parts`` are those of ``PluginRegistry``."""
        super().__init__(config, **parts)
        foreign_plugins = {e.plugin for e in self.entries if e.kind not in self.kinds}
        self.loader = PluginLoader(self.kinds.values(), foreign_plugins)
        self.loader.isolated = {e.plugin for e in self.entries if e.id in self.config.isolate}
        self.call_stats = PluginCallStats(self.config.plugin_time_budget)
        self._guards: dict[int, PluginGuard] = {}
        self._extensions: list[Entry] | None = None

    @classmethod
    def from_selection(
        cls, selection: PluginSelection, config: PluginConfig | None = None, source: Source = scan
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
        return cls(config, source=lambda: selection.entries(source), switches=switches)

    def load(self, kind: str, key: str) -> object:
        """Import the plugin that serves ``kind:key`` and return it."""
        return self.loader.load(self.choose(kind, key))

    def options(self, kind: str, key: str) -> Options:
        """Return the checked options of the plugin that serves ``kind:key``."""
        return self.options_of(self.choose(kind, key), key)

    def options_of(self, entry: Entry, key: str) -> Options:
        """Return the checked options of one plugin, as the server of ``key``."""
        table = self.config.plugin_options
        given = table.get(f"{entry.kind}:{key}", table.get(entry.id, {}))
        return check_options(self.loader.load(entry), entry.kind, key, given)

    def states(self) -> dict[str, str]:
        """Return the state of every plugin that was imported, by ``kind:key``."""
        return {e.id: e.state for e in self.entries if e.state in ("loaded", "broken")}

    def create(self, kind: PluginKind[T], key: str, **arguments: Any) -> T:
        """Call the hook of ``kind`` for ``key`` and return what it builds, as it is.

        ``arguments`` are those of the hook, without the key and ``options``.
        """
        arguments |= {kind.key_argument: key, "options": self.options(kind.name, key)}
        instance: T | None = self.hooks_for(kind.name, key).call(kind.hook, arguments)
        if instance is not None:
            return instance
        entry = self.choose(kind.name, key)
        if entry.key == FALLBACK and key != FALLBACK:
            reason = self.missing(kind.name, key)
            raise PluginNotFoundError(
                f"{reason}; the fallback of {entry.owner} cannot serve it either"
            )
        self.guard(kind, key).counter(kind.hook).record_failure()
        raise PluginLoadError(
            f"{kind.name}:{key} is declared by {entry.owner}, but its {kind.hook} returned None; "
            "report this to its authors"
        )

    def create_guarded(self, kind: PluginKind[T], key: str, **arguments: Any) -> T:
        """Return what ``create`` returns, behind the boundary that the kind declares."""
        instance: T = self.guarded(kind, key, self.create(kind, key, **arguments))
        return instance

    def guarded(self, kind: PluginKind[Any], key: str, instance: Any, contract: str = "") -> Any:
        """Return ``instance``, which the plugin of ``key`` has built, behind the boundary.

        ``contract`` names its protocol, if it is not what the hook builds.
        """
        return wrap(instance, self.guard(kind, key), contract=contract)

    def guard(self, kind: PluginKind[Any], key: str) -> PluginGuard:
        """Return what attributes failures to the plugin that serves ``key``."""
        return self._guard(self.choose(kind.name, key))

    def hooks_for(self, kind: str, key: str) -> PluginHooks:
        """Return the hooks of the plugin that serves a key, wrapped by the extensions."""
        return self.hooks(self.choose(kind, key))

    def hooks(self, entry: Entry, *, wrapped: bool = True) -> PluginHooks:
        """Return the hooks of one plugin, ``wrapped`` by the extensions or not."""
        extensions = [e for e in self.extensions() if e is not entry] if wrapped else []
        return PluginHooks(self.loader, self._guard(entry), map(self._guard, extensions))

    def offers(
        self, kind: PluginKind[T], pin: str | None = None, **arguments: Any
    ) -> tuple[list[T], list[Refusal]]:
        """Return the offers of all backends, or of the backend ``pin``, and their refusals.

        The highest score is the first, equal ones are in the order of their names. An error of the
        pinned backend is raised, one of others is a refusal.
        """
        offers, refusals = self._ranked_offers(kind, arguments, pin)
        return [offer for offer, _ in offers], refusals

    def best_offer(self, kind: PluginKind[T], pin: str | None = None, **arguments: Any) -> T | None:
        """Return the best of ``offers`` behind the boundary; ``None`` if every backend refuses."""
        offers, _ = self._ranked_offers(kind, arguments, pin)
        label = arguments.get("op", "")
        return wrap(offers[0][0], self._guard(offers[0][1]), label=label) if offers else None

    def _ranked_offers(
        self, kind: PluginKind[Any], arguments: dict[str, Any], pin: str | None
    ) -> tuple[list[tuple[Any, Entry]], list[Refusal]]:
        """Return the offers with their plugins, the best first, and all refusals.

        Of several backends, one that is broken or contested refuses with the reason; strict mode raises its error.
        """
        # A module behind two keys is asked twice and answers the same.
        offers: dict[tuple[str, str, str], tuple[Any, Entry]] = {}
        refusals: dict[str, Refusal] = {}
        for key in self.keys(kind.name) if pin is None else [pin]:
            try:
                entry = self.choose(kind.name, key)
                answers = self._request_offers(kind, entry, key, arguments)
            except (PluginLoadError, PluginConflictError) as error:
                if self.switches.strict or pin is not None:
                    raise
                answers = [Refusal(key, (str(error),))]
            if pin is not None:
                answers = [answer for answer in answers if answer.name == pin] or answers
            for answer in answers:
                if isinstance(answer, Refusal):
                    refusals[answer.name] = answer
                else:
                    offers.setdefault((entry.dist, entry.target, answer.name), (answer, entry))
        best = sorted(offers.values(), key=lambda offer: (-offer[0].score, offer[0].name))
        return best, [refusals[name] for name in sorted(refusals)]

    def _request_offers(
        self, kind: PluginKind[Any], entry: Entry, key: str, arguments: dict[str, Any]
    ) -> list[Any]:
        """Return the offers and refusals of one backend. Raises ``PluginLoadError`` for others."""
        options = self.options_of(entry, key)
        answers: list[Any] = self.hooks(entry).call(kind.hook, {**arguments, "options": options})
        for answer in answers:
            if not is_offer(answer):
                raise PluginLoadError(
                    f"{entry.id} answered {kind.hook} with {answer!r:.200}; an offer with a name, a "
                    "number as score and, for attention, page sizes was expected, or a Refusal with "
                    "reasons"
                )
        return answers

    def extensions(self) -> list[Entry]:
        """Return the loaded extensions. The first call imports them, in strict mode everything."""
        if self._extensions is None:
            if self.switches.strict:
                self._load_all(e for e in self.entries if e.usable)
            self._extensions = self.loaded(EXTENSIONS)
        return [e for e in self._extensions if e.state == "loaded"]

    def loaded(self, kind: PluginKind[Any]) -> list[Entry]:
        """Load all plugins of a kind; return them in name order without broken ones."""
        return self._load_all(self._usable(kind.name))

    def _guard(self, entry: Entry) -> PluginGuard:
        """Return the guard of a plugin, the same for all its hooks and objects."""
        guard = self._guards.get(id(entry))
        if guard is None:
            kind, strict = self.kinds[entry.kind], self.switches.strict
            guard = PluginGuard(entry, kind, self.call_stats, is_strict=strict)
            self._guards[id(entry)] = guard
        return guard

    def _load_all(self, entries: Iterable[Entry]) -> list[Entry]:
        """Load ``entries``; return them in name order without broken ones, which strict mode refuses."""
        loaded_entries: list[Entry] = []
        problems: list[PluginLoadError] = []
        for entry in sorted(entries, key=lambda e: (e.key, e.dist)):
            try:
                self.loader.load(entry)
            except PluginLoadError as error:
                problems.append(error)
            else:
                loaded_entries.append(entry)
        if problems and self.switches.strict:
            text = "\n  ".join(map(str, problems))
            raise PluginLoadError(f"strict mode, and plugins are broken:\n  {text}")
        for problem in problems:
            log.warning("%s; treadle goes on without it", problem)
        return loaded_entries
