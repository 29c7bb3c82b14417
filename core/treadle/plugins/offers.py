"""Offers of backends for a request: all are asked, and the highest score wins, equal ones by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from treadle.api.plugin_kind import PluginKind
from treadle.api.types import AttentionOffer, CommunicatorOffer, KernelOffer, Refusal
from treadle.errors import PluginConflictError, PluginLoadError
from treadle.plugins.entries import Entry

if TYPE_CHECKING:
    from treadle.plugins.manager import PluginManager

__all__ = ("ranked",)


def ranked(
    plugins: PluginManager,
    kind: PluginKind[Any],
    arguments: dict[str, Any],
    pin: str | None = None,
) -> tuple[list[tuple[Any, Entry]], list[Refusal]]:
    """Return the offers of all backends with their plugins, the best first, and all refusals.

    ``pin`` is the only backend to ask. Of several, one that is broken or contested refuses with the
    reason; strict mode raises its error.
    """
    # A module behind two keys is asked twice and answers the same.
    offers: dict[tuple[str, str, str], tuple[Any, Entry]] = {}
    refusals: dict[str, Refusal] = {}
    for key in plugins.keys(kind.name) if pin is None else [pin]:
        try:
            entry, answers = plugins.choose(kind.name, key), _ask(plugins, kind, key, arguments)
        except (PluginLoadError, PluginConflictError) as error:
            if plugins.switches.strict or pin is not None:
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


def _ask(
    plugins: PluginManager, kind: PluginKind[Any], key: str, arguments: dict[str, Any]
) -> list[Any]:
    """Return the offers and refusals of one backend. Raises ``PluginLoadError`` for anything else."""
    hooks, options = plugins.hooks_for(kind.name, key), plugins.options(kind.name, key)
    answers: list[Any] = hooks.call(kind.hook, {**arguments, "options": options})
    for answer in answers:
        if not _is_sound(answer):
            id = plugins.choose(kind.name, key).id
            raise PluginLoadError(
                f"{id} answered {kind.hook} with {answer!r:.200}; an offer with a name, a number "
                "as score and, for attention, page sizes was expected, or a Refusal with reasons"
            )
    return answers


def _is_sound(answer: object) -> bool:
    """Whether an answer can be compared with others; one that cannot must not spoil theirs."""
    match answer:
        case AttentionOffer(name=str(), score=int() | float(), page_sizes=[_, *_] as sizes):
            return all(isinstance(size, int) for size in sizes)
        case KernelOffer(name=str(), score=int() | float()):
            return True
        case CommunicatorOffer(name=str(), score=int() | float()):
            return True
        case Refusal(name=str(), reasons=tuple() | list() as reasons):
            return all(isinstance(reason, str) for reason in reasons)
    return False
