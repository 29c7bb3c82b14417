"""Exchanging one distribution's plugins while their host is in use.

A host that is in use is not changed. Another one is made, which shares all other plugins with it;
whoever holds the first goes on with what it has, and its user swaps one reference.

The new code is imported twice: by the doctor in a process of its own, where it may hang or crash,
and then here, with the old modules put back if anything goes wrong.
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
from treadle_server.owners import home

__all__ = ("RELOADABLE", "Reloaded", "fresh_import", "reloaded", "with_replaced")

R = TypeVar("R", bound=PluginManager)

RELOADABLE = frozenset({"tool_parsers", "reasoning_parsers", "server"})
"""Kinds whose plugins live in the process of the server, and are asked anew by each request."""

OURS = frozenset({"treadle", "treadle_server", "treadle_cli"})
"""Packages that are never imported a second time."""


class Reloaded(msgspec.Struct, frozen=True):
    """What was exchanged: ``plugins`` are the ids that were imported again."""

    id: str
    distribution: str
    version: str
    previous_version: str
    plugins: list[str]


@contextmanager
def reloaded(
    plugins: R,
    id: str,
    *,
    in_use: Collection[str] = (),
    seconds: float = 30.0,
) -> Iterator[tuple[R, Reloaded]]:
    """Another host like ``plugins``, with the code that the owner of ``id`` has on disk now.

    The block tries it; if it raises, the old modules are put back. ``in_use`` are the ids that
    other processes have loaded; the first import may take ``seconds``. Not for two threads at once.

    Raises ``PluginNotFoundError`` (there is no such id), ``PluginReloadError`` (it must not be
    exchanged), ``PluginConflictError`` (contested, or not as locked), ``ConfigError`` (a local file
    cannot be read) and ``PluginLoadError`` (the new code is broken, in the words of the doctor).
    """
    entry = _named(plugins, id)
    old = [e for e in plugins.entries if _together(e, entry)]
    importlib.invalidate_caches()  # something may have been installed since
    new = [e for e in plugins.declared() if _together(e, entry)]
    _refuse(entry, old, new, in_use)
    fresh = with_replaced(plugins, old, new)
    used = {e.id for e in old if e.state in ("loaded", "broken")} | {id}
    wanted = [e for e in new if e.id in used and e.kind in RELOADABLE]
    if id not in {e.id for e in wanted}:
        raise PluginLoadError(
            f"{id} is not declared by {entry.dist} any more; {entry.owner} stays in use"
        )
    _examine(fresh, entry, wanted, seconds)
    with fresh_import({home(e) for e in (*old, *new)}):
        for each in wanted:
            fresh.load(each.kind, each.key)
        owner = wanted[0]
        done = sorted({e.id for e in wanted})
        yield fresh, Reloaded(id, owner.dist, owner.version, entry.version, done)


def with_replaced(plugins: R, old: Collection[Entry], new: Collection[Entry]) -> R:
    """Another host with ``new`` instead of ``old``, which shares everything else.

    Raises ``PluginConflictError`` if the lock file does not allow ``new``.
    """
    other, removed = copy(plugins), set(map(id, old))
    other.entries = [*(e for e in plugins.entries if id(e) not in removed), *new]
    other.chosen = {}
    plugins.switches.apply(new)
    other.check_lock()
    other.loader = PluginLoader(plugins.kinds.values(), plugins.loader.foreign)
    names = {entry.plugin for entry in old}
    for name, plugin in list(plugins.loader.plugins.items()):
        if name not in names:
            other.loader.add(name, plugin)
    return other


@contextmanager
def fresh_import(packages: Collection[str]) -> Iterator[None]:
    """Inside the block ``packages`` and what is in them are imported from their files. The modules
    that were there before come back if the block raises."""
    before = _taken(packages)
    try:
        yield
    except BaseException:
        _taken(packages)
        sys.modules.update(before)
        for name in packages:
            parent, _, child = name.rpartition(".")
            if name in before and parent in sys.modules:
                setattr(sys.modules[parent], child, before[name])
        raise


def _taken(packages: Collection[str]) -> dict[str, ModuleType]:
    found = {
        name: module
        for name, module in list(sys.modules.items())
        if any(name == package or name.startswith(f"{package}.") for package in packages)
    }
    for name in found:
        del sys.modules[name]
    return found


def _named(plugins: PluginManager, id: str) -> Entry:
    kind, _, key = id.partition(":")
    if kind in plugins.kinds and not any(e.id == id for e in plugins.entries):
        raise PluginNotFoundError(plugins.missing(kind, key))
    return plugins.choose(kind, key)


def _together(one: Entry, other: Entry) -> bool:
    """Whether two entries come from one distribution, or one local file."""
    return normal(one.dist) == normal(other.dist) and one.file == other.file


def _refuse(
    entry: Entry, old: Sequence[Entry], new: Sequence[Entry], in_use: Collection[str]
) -> None:
    kinds = ", ".join(sorted(RELOADABLE))
    what = "install the other version and restart the server"
    if entry.kind not in RELOADABLE:
        raise PluginReloadError(
            f"{entry.id} cannot be exchanged while the server runs: what {entry.kind} make is built "
            f"into the engine or the process when it starts; {what} (exchangeable: {kinds})"
        )
    if normal(entry.dist) in ALWAYS_ALLOWED or OURS & {
        home(e).partition(".")[0] for e in (*old, *new)
    }:
        raise PluginReloadError(
            f"{entry.id} of {entry.dist} is code of treadle itself, which everything else is made of; "
            f"{what}"
        )
    for other in old:
        if other.kind not in RELOADABLE and (other.state == "loaded" or other.id in in_use):
            raise PluginReloadError(
                f"{entry.dist} also provides {other.id}, which is in use and cannot be exchanged "
                f"(exchangeable: {kinds}), and two versions must not be mixed; {what}"
            )


def _examine(
    fresh: PluginManager,
    entry: Entry,
    wanted: Sequence[Entry],
    seconds: float,
) -> None:
    """Raise ``PluginLoadError`` with what the doctor finds fatal."""
    checked, _ = check(fresh, wanted, seconds=seconds)
    found = dict.fromkeys(f"{f.code}: {f.text}" for c in checked for f in c.findings if f.fatal)
    if found:
        said = "\n  ".join(found)
        raise PluginLoadError(f"{wanted[0].owner} cannot be used, {entry.owner} stays:\n  {said}")
