"""Choosing by match: which plugin of a kind is made for a model, where the option is ``auto``."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from treadle.api.matching import Match, ModelTraits
from treadle.errors import ConfigError, PluginConflictError, PluginLoadError, TreadleError

if TYPE_CHECKING:
    from treadle.plugins.host import Host

__all__ = ("AUTO", "NONE", "Candidate", "Decision", "candidates", "decide")

log = logging.getLogger("treadle.plugins")

AUTO, NONE = "auto", "none"
FLAGS = {
    "tool_parsers": "--tool-parser",
    "reasoning": "--reasoning-parser",
    "renderers": "--renderer",
    "quantization": "--quantization",
}
"""The option that decides where plugins do not."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """What one plugin said of a model; ``score`` is 0 if it is not made for it or could not say."""

    key: str
    score: int
    reason: str


class Matching(Protocol):
    """The part of the plugin host that decides."""

    def matches(self, kind: str, model: ModelTraits) -> list[Candidate]: ...


@dataclass(frozen=True, slots=True)
class Decision:
    """The key that is used (``None``: no plugin is), why, and the others, the runner-up first."""

    key: str | None
    reason: str
    others: Sequence[Candidate] = ()


def candidates(host: Host, kind: str, model: ModelTraits) -> list[Candidate]:
    """Every usable plugin of a kind, the best match first, equal ones by name.

    One that is broken or contested, or that raises, is logged and matches nothing; strict mode
    raises its error. Raises ``ConfigError`` for wrong options of a plugin.
    """
    found: list[Candidate] = []
    for key in host.keys(kind):
        try:
            found.append(_asked(host, kind, key, model))
        except ConfigError:
            raise
        except TreadleError as error:
            if host.switches.strict:
                raise
            log.warning("%s; it is not asked whether it is made for this model", error)
            found.append(Candidate(key, 0, str(error)))
    return sorted(found, key=lambda c: (-c.score, c.key))


def decide(host: Matching, kind: str, model: ModelTraits, option: str) -> Decision:
    """What an option means: ``auto`` asks the plugins, ``none`` is nobody, all others are a key.

    Raises ``PluginConflictError`` if several match equally well.
    """
    if option == NONE:
        return Decision(None, f"{FLAGS[kind]} none")
    if option != AUTO:
        return Decision(option, f"{FLAGS[kind]} {option}")
    found = host.matches(kind, model)
    equal = [c for c in found if c.score > 0 and c.score == found[0].score]
    if len(equal) > 1:
        said = "".join(f"\n  {c.key}: {c.reason}" for c in equal)
        raise PluginConflictError(
            f"several plugins of the kind {kind} match this model equally well; choose one with "
            f"{FLAGS[kind]} NAME:{said}"
        )
    if not equal:
        return Decision(None, "no installed plugin matches this model", found)
    return Decision(equal[0].key, f"{equal[0].reason} (score {equal[0].score})", found[1:])


def _asked(host: Host, kind: str, key: str, model: ModelTraits) -> Candidate:
    match host.match(kind, key, model):
        case None:
            asked = "treadle_match" in host.hooks_of(host.load(kind, key))[0]
            said = "sees nothing of its own" if asked else "does not say what it matches"
            return Candidate(key, 0, said)
        case Match(score=int(score), reason=str(reason)) if score > 0 and reason:
            return Candidate(key, score, reason)
        case other:
            raise PluginLoadError(
                f"{kind}:{key} answered treadle_match with {other!r}; a Match with a score above 0 and "
                "a reason, or None, is wanted"
            )
