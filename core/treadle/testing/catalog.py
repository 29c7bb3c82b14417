"""Which suite is for which kind: for ``treadle plugin test`` and for tests over all plugins."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from treadle.plugins import installed_kinds

__all__ = ("ALONE", "SUITES", "suite_of")

SUITES: Mapping[str, str] = {
    name: kind.suite for name, kind in sorted(installed_kinds().items()) if kind.suite
}
"""Kind to ``module:class``, as the kinds declare it."""

ALONE = frozenset(name for name in SUITES if not installed_kinds()[name].suite_needs_subclass)
"""Kinds of which the suite needs nothing but the key."""


def suite_of(kind: str) -> type | None:
    """Return the suite of a kind that needs nothing but the key, ``None`` if there is none."""
    if kind not in ALONE:
        return None
    module, _, name = SUITES[kind].partition(":")
    suite: type = getattr(import_module(module), name)
    return suite
