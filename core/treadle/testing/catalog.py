"""The conformance suite of each kind, for ``treadle plugin test`` and for tests over all plugins."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from treadle.plugins import installed_kinds

__all__ = ("STANDALONE_KINDS", "SUITES", "suite_of")

SUITES: Mapping[str, str] = {
    name: kind.suite for name, kind in sorted(installed_kinds().items()) if kind.suite
}
"""Kind to ``module:class``, as the kinds declare it."""

STANDALONE_KINDS = frozenset(
    name for name in SUITES if not installed_kinds()[name].suite_needs_subclass
)
"""Kinds with a suite that needs only the key."""


def suite_of(kind: str) -> type | None:
    """Return the suite of a kind if it needs only the key, else ``None``."""
    if kind not in STANDALONE_KINDS:
        return None
    module, _, name = SUITES[kind].partition(":")
    suite: type = getattr(import_module(module), name)
    return suite
