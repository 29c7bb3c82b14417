"""Import one distribution's plugins again while their plugin manager is in use.

A plugin manager in use is not changed. A new one is built that shares all other plugins with it.
Code that holds the old manager continues with it; the server replaces one reference.

The new code is imported twice: by the examination in a separate process, where it may hang or
crash, and then here, with the old modules restored if anything fails.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from types import ModuleType
from typing import TypeVar

import msgspec

from treadle.errors import PluginLoadError, PluginNotFoundError, PluginReloadError
from treadle.known_plugins import ALWAYS_ALLOWED
from treadle.plugins import PluginManager
from treadle.plugins.entries import Entry, normal
from treadle.plugins.loader import PluginLoader
from treadle.testing.examination.checks import check
from treadle_server.plugin_faults import module_of

__all__ = ("RELOADABLE", "ReloadResult", "fresh_import", "reloaded_plugins", "with_replaced")

R = TypeVar("R", bound=PluginManager)

RELOADABLE = frozenset({"tool_parsers", "reasoning_parsers", "server"})
"""Kinds whose plugins live in the server's process and are looked up for each request."""

CORE_PACKAGES = frozenset({"treadle", "treadle_server", "treadle_cli"})
"""Packages that are never imported a second time."""


class ReloadResult(msgspec.Struct, frozen=True):
    """The result of a reload. ``plugins`` are the ids that were imported again."""

    id: str
    distribution: str
    version: str
    previous_version: str
    plugins: list[str]


@contextmanager
def reloaded_plugins(
    plugins: R,
    id: str,
    *,
    in_use: Collection[str] = (),
    seconds: float = 30.0,
) -> Iterator[tuple[R, ReloadResult]]:
    """Yield a copy of ``plugins`` with the code that the distribution of ``id`` has on disk now.

    The block tests the copy; if it raises, the old modules are restored. ``in_use`` are the ids that
    other processes have loaded; the first import may take ``seconds``. Not thread-safe.

    Raises ``PluginNotFoundError`` (there is no such id), ``PluginReloadError`` (it cannot be
    reloaded), ``PluginConflictError`` (in conflict, or not as locked), ``ConfigError`` (a local file
    cannot be read) and ``PluginLoadError`` (the new code is broken, with the findings).
    """
    entry = _find_entry(plugins, id)
    old = [e for e in plugins.entries if _same_distribution(e, entry)]
    importlib.invalidate_caches()  # the distribution may have been installed again since the last import
    new = [e for e in plugins.declared() if _same_distribution(e, entry)]
    _refuse(entry, old, new, in_use)
    new_plugins = with_replaced(plugins, old, new)
    active_ids = {e.id for e in old if e.state in ("loaded", "broken")} | {id}
    entries = [e for e in new if e.id in active_ids and e.kind in RELOADABLE]
    if id not in {e.id for e in entries}:
        raise PluginLoadError(
            f"{id} is not declared by {entry.dist} any more; {entry.owner} stays in use"
        )
    _examine(new_plugins, entry, entries, seconds)
    with fresh_import({module_of(e) for e in (*old, *new)}):
        for new_entry in entries:
            new_plugins.load(new_entry.kind, new_entry.key)
        owner = entries[0]
        reloaded_ids = sorted({e.id for e in entries})
        yield new_plugins, ReloadResult(id, owner.dist, owner.version, entry.version, reloaded_ids)


def with_replaced(plugins: R, old: Collection[Entry], new: Collection[Entry]) -> R:
    """Return a copy of ``plugins`` with entries ``new`` instead of ``old`` that shares all others.

    Raises ``PluginConflictError`` if the lock file does not allow ``new``.
    """
    new_plugins, removed = copy(plugins), set(map(id, old))
    new_plugins.entries = [*(e for e in plugins.entries if id(e) not in removed), *new]
    new_plugins.resolved_entries = {}
    plugins.switches.apply(new)
    new_plugins.check_lock()
    new_plugins.loader = PluginLoader(plugins.kinds.values(), plugins.loader.foreign_plugins)
    new_plugins.loader.isolated = plugins.loader.isolated
    names = {entry.plugin for entry in old}
    for name, plugin in list(plugins.loader.plugins.items()):
        if name not in names:
            new_plugins.loader.add(name, plugin)
    return new_plugins


@contextmanager
def fresh_import(packages: Collection[str]) -> Iterator[None]:
    """A block in which ``packages`` and their modules are imported from their files again.

    The previous modules are restored if the block raises.
    """
    saved_modules = _pop_modules(packages)
    try:
        yield
    except BaseException:
        _pop_modules(packages)
        sys.modules.update(saved_modules)
        for name in packages:
            parent, _, child = name.rpartition(".")
            if name in saved_modules and parent in sys.modules:
                setattr(sys.modules[parent], child, saved_modules[name])
        raise


def _pop_modules(packages: Collection[str]) -> dict[str, ModuleType]:
    modules = {
        name: module
        for name, module in list(sys.modules.items())
        if any(name == package or name.startswith(f"{package}.") for package in packages)
    }
    for name in modules:
        del sys.modules[name]
    return modules


def _find_entry(plugins: PluginManager, id: str) -> Entry:
    kind, _, key = id.partition(":")
    if kind in plugins.kinds and not any(e.id == id for e in plugins.entries):
        raise PluginNotFoundError(plugins.missing(kind, key))
    return plugins.choose(kind, key)


def _same_distribution(entry: Entry, other: Entry) -> bool:
    """Whether two entries come from one distribution, or one local file."""
    return normal(entry.dist) == normal(other.dist) and entry.file == other.file


def _refuse(
    entry: Entry, old: Sequence[Entry], new: Sequence[Entry], in_use: Collection[str]
) -> None:
    kinds = ", ".join(sorted(RELOADABLE))
    advice = "install the other version and restart the server"
    if entry.kind not in RELOADABLE:
        raise PluginReloadError(
            f"{entry.id} cannot be reloaded while the server runs: plugins of kind {entry.kind} become "
            f"part of the engine or the process when it starts; {advice} (reloadable: {kinds})"
        )
    if normal(entry.dist) in ALWAYS_ALLOWED or CORE_PACKAGES & {
        module_of(e).partition(".")[0] for e in (*old, *new)
    }:
        raise PluginReloadError(
            f"{entry.id} of {entry.dist} is code of treadle itself, which all other code depends on; "
            f"{advice}"
        )
    for old_entry in old:
        if old_entry.kind not in RELOADABLE and (
            old_entry.state == "loaded" or old_entry.id in in_use
        ):
            raise PluginReloadError(
                f"{entry.dist} also provides {old_entry.id}, which is in use and cannot be reloaded "
                f"(reloadable: {kinds}), and two versions must not be mixed; {advice}"
            )


def _examine(
    plugins: PluginManager,
    entry: Entry,
    entries: Sequence[Entry],
    seconds: float,
) -> None:
    """Raise ``PluginLoadError`` with the fatal findings of the examination."""
    checked, _ = check(plugins, entries, seconds=seconds)
    problems = dict.fromkeys(f"{f.code}: {f.text}" for c in checked for f in c.findings if f.fatal)
    if problems:
        text = "\n  ".join(problems)
        raise PluginLoadError(f"{entries[0].owner} cannot be used, {entry.owner} stays:\n  {text}")
