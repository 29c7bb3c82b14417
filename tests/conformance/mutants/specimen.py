"""A sound plugin, and what may be wrong with it: data of ``tests/conformance/test_mutants.py``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

__all__ = ("SHARED", "Mutant", "Specimen")


@dataclass(frozen=True)
class Mutant:
    """One fault: each key of ``edits`` stands in the sound plugin and becomes its value.

    ``fails`` is the check that finds it, and no other does. Where a fault cannot but show in more
    than one check, the others are ``also``, and ``why`` says why.
    """

    fails: str
    edits: Mapping[str, str]
    also: frozenset[str] = frozenset()
    why: str = ""

    def __post_init__(self) -> None:
        if bool(self.also) != bool(self.why):
            raise ValueError(f"{self.fails}: say why it shows in {sorted(self.also)}")


@dataclass(frozen=True)
class Specimen:
    """A plugin that passes ``suite``, as the text of a module, and its ``mutants``.

    ``suite`` is a suite of ``treadle.testing``, or a subclass that says what the plugin takes, with
    sizes that run in a fraction of a second; ``only`` narrows the values of parametrized checks, by
    argument. The plugin is loaded from a file; with ``metadata`` it is installed, as the
    distribution that this text describes.
    """

    suite: type
    plugin: str
    source: str
    mutants: Collection[Mutant]
    only: Mapping[str, Collection[Any]] = field(default_factory=dict)
    metadata: str = ""

    @property
    def kind(self) -> str:
        return self.plugin.partition(":")[0]

    @property
    def key(self) -> str:
        return self.plugin.partition(":")[2]

    def mutated(self, mutant: Mutant) -> Specimen:
        """Raises ``ValueError`` for an edit of what is not there."""
        source, metadata = self.source, self.metadata
        for old, new in mutant.edits.items():
            if old not in source + metadata:
                raise ValueError(f"{self.plugin} has no {old!r} to be replaced")
            source, metadata = source.replace(old, new), metadata.replace(old, new)
        return replace(self, source=source, metadata=metadata)


SHARED = {"@impl": "ONE = Mine()\n\n\n@impl", "Mine() if": "ONE if"}
"""The edits of a plugin ``Mine`` that makes one object for all."""
