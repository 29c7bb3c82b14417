"""The hooks that plugins implement, the hooks that are called, and the plugins' report lines.

For tests, the conformance suites and the command line; the engine does not use it.
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
    names: list[str] = []
    undo = plugins.loader.pm.add_hookcall_monitoring(
        before=lambda name, impls, arguments: names.append(name),
        after=lambda outcome, name, impls, arguments: None,
    )
    try:
        yield names
    finally:
        undo()


def hooks_of(plugins: PluginManager, plugin: object) -> tuple[list[str], list[str]]:
    """Return the names of the hooks that a loaded plugin implements, and of those it wraps."""
    hook_names: list[str] = []
    wrapper_names: list[str] = []
    for caller in plugins.loader.pm.get_hookcallers(plugin) or []:
        for impl in caller.get_hookimpls():
            if impl.plugin is plugin:
                (wrapper_names if impl.wrapper else hook_names).append(caller.name)
    return sorted(hook_names), sorted(wrapper_names)


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
