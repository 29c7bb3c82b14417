"""What the plugins of a manager implement, which hooks are called, and what they report.

For tests, the conformance suites and the command line; an engine needs none of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from treadle.errors import TreadleError
from treadle.plugins import PluginManager

__all__ = ("hook_calls", "hooks_of", "report")


@contextmanager
def hook_calls(plugins: PluginManager) -> Iterator[list[str]]:
    """Collect the names of the hooks that are called inside the block."""
    called: list[str] = []
    undo = plugins.loader.pm.add_hookcall_monitoring(
        before=lambda name, impls, arguments: called.append(name),
        after=lambda outcome, name, impls, arguments: None,
    )
    try:
        yield called
    finally:
        undo()


def hooks_of(plugins: PluginManager, plugin: object) -> tuple[list[str], list[str]]:
    """Return the names of the hooks that a loaded plugin implements, and of those it wraps."""
    plain: list[str] = []
    wrapped: list[str] = []
    for caller in plugins.loader.pm.get_hookcallers(plugin) or []:
        for found in caller.get_hookimpls():
            if found.plugin is plugin:
                (wrapped if found.wrapper else plain).append(caller.name)
    return sorted(plain), sorted(wrapped)


def report(plugins: PluginManager) -> list[str]:
    """Return the lines that loaded plugins add to ``treadle doctor``."""
    lines: list[str] = []
    reported: set[int] = set()
    plugins.extensions()
    for entry in sorted(plugins.entries, key=lambda e: (e.dist, e.id)):
        if entry.state != "loaded" or id(plugins.loader.load(entry)) in reported:
            continue
        reported.add(id(plugins.loader.load(entry)))
        try:
            texts = plugins.hooks(entry, wrapped=False).treadle_report()
            lines += [f"{entry.owner}: {text}" for text in texts]
        except TreadleError as error:
            lines.append(f"{entry.owner}: treadle_report failed: {error}")
    return lines
