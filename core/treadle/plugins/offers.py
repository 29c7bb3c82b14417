"""Selection by offer: every backend of a kind is asked, the highest score wins, ties go by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from treadle.api.plugin_kind import PluginKind
from treadle.api.types import AttentionOffer, CommunicatorOffer, KernelOffer, Refusal
from treadle.errors import ConfigError, PluginConflictError, PluginLoadError, PluginNotFoundError
from treadle.known_plugins import install_hint, known_distributions
from treadle.plugins.boundary import wrap
from treadle.plugins.entries import Entry

if TYPE_CHECKING:
    from treadle.plugins.manager import PluginManager

__all__ = ("all_offers", "best_offer", "pinned_offer", "required_offer")

T = TypeVar("T")
Answers = list[tuple[Any, Entry | None]]


def all_offers(
    plugins: PluginManager, kind: PluginKind[T], **arguments: Any
) -> tuple[list[T], list[Refusal]]:
    """Return all offers, the best first, and all refusals. A broken backend is a refusal."""
    offers, refusals = _ranked(plugins, kind, arguments)
    return [offer for offer, _ in offers], refusals


def best_offer(plugins: PluginManager, kind: PluginKind[T], **arguments: Any) -> T | None:
    """Return the best offer behind the boundary, or ``None`` if every backend refuses."""
    offers, _ = _ranked(plugins, kind, arguments)
    return _guarded(plugins, kind, *offers[0], arguments) if offers else None


def required_offer(plugins: PluginManager, kind: PluginKind[T], **arguments: Any) -> T:
    """Return the best offer behind the boundary.

    Raises ``PluginNotFoundError`` with every refusal, and what could be installed, if there is none.
    """
    offers, refusals = _ranked(plugins, kind, arguments)
    if offers:
        best: T = _guarded(plugins, kind, *offers[0], arguments)
        return best
    reasons = "".join(f"\n  {r.name}: {'; '.join(r.reasons)}" for r in refusals)
    installed = {entry.dist for entry in plugins.entries}
    missing = [dist for dist in known_distributions(kind.name) if dist not in installed]
    hint = f"\n  not installed: {', '.join(missing)}; {install_hint(*missing)}" if missing else ""
    raise PluginNotFoundError(
        f"no {kind.name} {kind.key} can serve this model:{reasons or ' none is installed'}{hint}"
    )


def pinned_offer(plugins: PluginManager, kind: PluginKind[T], key: str, **arguments: Any) -> T:
    """Return the offer of one backend behind the boundary, whatever the others offer.

    Raises ``ConfigError`` with the reasons if it refuses.
    """
    answers = _ask(plugins, kind, key, arguments)
    mine = [a for a in answers if a[0].name == key] or answers
    for answer, entry in mine:
        if not isinstance(answer, Refusal):
            pinned: T = _guarded(plugins, kind, answer, entry, arguments)
            return pinned
    reasons = "; ".join(r for answer, _ in mine for r in answer.reasons) or "it did not bid"
    able = ", ".join(offer.name for offer, _ in _ranked(plugins, kind, arguments)[0]) or "none"
    raise ConfigError(
        f"{kind.option.strip('-').replace('-', '_')} is {key!r}, which cannot serve this model: {reasons}; backends that can: "
        f"{able}"
    )


def _guarded(
    plugins: PluginManager,
    kind: PluginKind[T],
    offer: Any,
    entry: Entry | None,
    arguments: dict[str, Any],
) -> T:
    guard = plugins.boundary_guard(kind, entry or plugins.choose(kind.name, offer.name))
    guarded: T = wrap(offer, kind, guard, label=arguments.get("op", ""))
    return guarded


def _ranked(
    plugins: PluginManager, kind: PluginKind[Any], arguments: dict[str, Any]
) -> tuple[Answers, list[Refusal]]:
    """Ask every backend; one that is broken or contested refuses with the reason."""
    # A module behind two keys is asked twice and answers the same.
    answers: dict[tuple[str, str, str], tuple[Any, Entry | None]] = {}
    for key in plugins.keys(kind.name):
        try:
            for answer, entry in _ask(plugins, kind, key, arguments):
                answers.setdefault((entry.dist, entry.target, answer.name), (answer, entry))
        except (PluginLoadError, PluginConflictError) as error:
            if plugins.switches.strict:
                raise
            answers["", "", key] = Refusal(key, (str(error),)), None
    offers = [a for a in answers.values() if not isinstance(a[0], Refusal)]
    refusals = [answer for answer, _ in answers.values() if isinstance(answer, Refusal)]
    offers.sort(key=lambda a: (-a[0].score, a[0].name))
    return offers, sorted(refusals, key=lambda r: r.name)


def _ask(
    plugins: PluginManager, kind: PluginKind[Any], key: str, arguments: dict[str, Any]
) -> list[tuple[Any, Entry]]:
    entry = plugins.choose(kind.name, key)
    options = plugins.options(kind.name, key)
    answers = plugins.hooks_for(kind.name, key).call(kind.hook, {**arguments, "options": options})
    for answer in answers:
        if not _is_sound(answer):
            raise PluginLoadError(
                f"{entry.id} answered {kind.hook} with {answer!r:.200}; an offer with a name, a number "
                "as score and, for attention, page sizes is wanted, or a Refusal with reasons"
            )
    return [(answer, entry) for answer in answers]


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
