"""Which plugin is made for a model: all of a kind are asked, and the highest score wins.

They are asked when the option is ``auto``; of equal answers that of treadle's own plugin counts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from treadle.api.kinds import REASONING_PARSERS, TOOL_PARSERS
from treadle.api.matching import Match, ModelTraits
from treadle.api.plugin_kind import PluginKind
from treadle.config import DeviceConfig
from treadle.errors import (
    ConfigError,
    PluginConflictError,
    PluginLoadError,
    PluginNotFoundError,
    TreadleError,
)
from treadle.known_plugins import DISTRIBUTIONS, install_hint
from treadle.plugins import PluginManager

__all__ = (
    "AUTO",
    "NONE",
    "NOTHING",
    "Candidate",
    "Decision",
    "candidates",
    "choose_executor",
    "decide",
)

log = logging.getLogger("treadle.plugins")

AUTO, NONE = "auto", "none"
NOTHING = "sees nothing of its own"


@dataclass(frozen=True, slots=True)
class Candidate:
    """The answer of one plugin; ``score`` is 0 if it does not match the model or failed."""

    key: str
    score: int
    reason: str


@dataclass(frozen=True, slots=True)
class Decision:
    """The key to use (``None``: no plugin), the reason, and the alternatives, the runner-up first."""

    key: str | None
    reason: str
    alternatives: Sequence[Candidate] = ()


def decide(
    plugins: PluginManager, kind: PluginKind[Any], model: ModelTraits, option: str
) -> Decision:
    """Return what an option means: ``auto`` asks the plugins, ``none`` is none, others are keys.

    Of equal strangers, no parser is used; for other kinds, and strictly, ``PluginConflictError``.
    """
    if option == NONE:
        return Decision(None, f"{kind.option} none")
    if option != AUTO:
        return Decision(option, f"{kind.option} {option}")
    matches = candidates(plugins, kind, model)
    equal = [c for c in matches if c.score > 0 and c.score == matches[0].score]
    if len(equal) > 1:
        owners = {c.key: plugins.choose(kind.name, c.key) for c in equal}
        claims = "".join(f"\n  {c.key} from {owners[c.key].owner}: {c.reason}" for c in equal)
        text = f"several {kind.name} match this model equally well; choose one with {kind.option} NAME:{claims}"
        equal = [c for c in equal if owners[c.key].dist in DISTRIBUTIONS]
        if len(equal) != 1:
            if plugins.switches.strict or kind not in (TOOL_PARSERS, REASONING_PARSERS):
                raise PluginConflictError(text)
            log.error("none is used; %s", text)
            return Decision(None, text, matches)
        log.warning("treadle's own %s:%s is used; %s", kind.name, equal[0].key, text)
    if not equal:
        return Decision(None, "no installed plugin matches this model", matches)
    matches.remove(equal[0])
    return Decision(equal[0].key, f"{equal[0].reason} (score {equal[0].score})", matches)


def candidates(
    plugins: PluginManager, kind: PluginKind[Any], model: ModelTraits
) -> list[Candidate]:
    """Return every usable plugin of a kind, the best match first, equal ones by name.

    One that is broken or contested, or that raises, is logged and matches nothing; strict mode
    raises its error. Raises ``ConfigError`` for wrong options of a plugin.
    """
    result: list[Candidate] = []
    for key in plugins.keys(kind.name):
        try:
            result.append(_candidate(plugins, kind, key, model))
        except ConfigError:
            raise
        except TreadleError as error:
            if plugins.switches.strict:
                raise
            log.warning("%s; it is not asked whether it is made for this model", error)
            result.append(Candidate(key, 0, str(error)))
    return sorted(result, key=lambda c: (-c.score, c.key))


def _candidate(
    plugins: PluginManager, kind: PluginKind[Any], key: str, model: ModelTraits
) -> Candidate:
    hooks, options = plugins.hooks_for(kind.name, key), plugins.options(kind.name, key)
    match hooks.treadle_match(kind=kind.name, key=key, model=model, options=options):
        case None:
            has_hook = hasattr(plugins.load(kind.name, key), "treadle_match")
            reason = NOTHING if has_hook else "does not say what it matches"
            return Candidate(key, 0, reason)
        case Match(score=int(score), reason=str(reason)) if score > 0 and reason:
            return Candidate(key, score, reason)
        case answer:
            raise PluginLoadError(
                f"{kind.name}:{key} answered treadle_match with {answer!r}; a Match with a score above 0 "
                "and a reason was expected, or None"
            )


def choose_executor(device: DeviceConfig, plugins: PluginManager) -> str:
    """Return the executor of a configuration: ``auto`` is ``uni`` for one rank, and for several the
    installed one that runs them, ``mp`` before others.

    Raises ``PluginNotFoundError`` if none is installed.
    """
    if device.distributed_executor_backend != AUTO:
        return device.distributed_executor_backend
    if device.tensor_parallel_size == 1:
        return "uni"
    names = [name for name in plugins.keys("executors") if name != "uni"]
    if not names:
        raise PluginNotFoundError(
            f"tensor_parallel_size is {device.tensor_parallel_size} and no executor for several "
            f"devices is installed; {install_hint('treadle-executor-mp')}"
        )
    return min(names, key=lambda name: (name != "mp", name))
