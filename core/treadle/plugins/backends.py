"""Choosing by bid: every backend is asked, the highest score wins, ties go by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from treadle.errors import ConfigError, PluginConflictError, PluginLoadError, PluginNotFoundError

if TYPE_CHECKING:
    from treadle.api import types as t
    from treadle.plugins.registry import Registry

__all__ = ("attention", "best", "kernel", "kernels", "pinned")


def attention(
    registry: Registry, request: t.AttentionRequest
) -> tuple[list[t.Offer], list[t.Refusal]]:
    """All bids for one attention configuration."""
    from treadle.api.types import Offer, Refusal

    bids = _bids(registry, "attention", "treadle_attention", request=request)
    offers = sorted((b for b in bids if isinstance(b, Offer)), key=lambda o: (-o.score, o.name))
    refusals = sorted((b for b in bids if isinstance(b, Refusal)), key=lambda r: r.name)
    return offers, refusals


def best(registry: Registry, request: t.AttentionRequest) -> t.Offer:
    offers, refusals = attention(registry, request)
    if offers:
        return offers[0]
    lines = (
        "".join(f"\n  {r.name}: {'; '.join(r.reasons)}" for r in refusals) or " none is installed"
    )
    raise PluginNotFoundError(f"no attention backend can serve this model:{lines}")


def pinned(registry: Registry, request: t.AttentionRequest, key: str) -> t.Offer:
    """The offer of one backend, whatever others would bid."""
    from treadle.api.types import Offer

    answers = _ask(registry, "attention", key, "treadle_attention", request=request)
    mine = [a for a in answers if a.name == key] or answers
    for answer in mine:
        if isinstance(answer, Offer):
            return answer
    reasons = "; ".join(r for answer in mine for r in answer.reasons) or "it did not bid"
    offers, _ = attention(registry, request)
    able = ", ".join(o.name for o in offers) or "none"
    raise ConfigError(
        f"attention_backend is {key!r}, which cannot serve this model: {reasons}; backends that can: {able}"
    )


def kernels(
    registry: Registry, op: str, request: t.KernelRequest
) -> tuple[list[t.KernelOffer], list[t.Refusal]]:
    """All bids for one operation of the layers."""
    from treadle.api.types import KernelOffer, Refusal

    bids = _bids(registry, "kernels", "treadle_kernel", op=op, request=request)
    offers = sorted(
        (b for b in bids if isinstance(b, KernelOffer)), key=lambda o: (-o.score, o.name)
    )
    refusals = sorted((b for b in bids if isinstance(b, Refusal)), key=lambda r: r.name)
    return offers, refusals


def kernel(registry: Registry, op: str, request: t.KernelRequest) -> t.KernelOffer | None:
    """The best offer for one operation of the layers."""
    offers, _ = kernels(registry, op, request)
    return offers[0] if offers else None


def _bids(registry: Registry, kind: str, hook: str, **arguments: Any) -> list[Any]:
    """The bids of every backend; one that is broken or contested refuses with the reason."""
    from treadle.api.types import Refusal

    found: dict[tuple[str, str, str], Any] = {}
    for key in registry.keys(kind):
        try:
            entry = registry.choose(kind, key)
            for bid in _ask(registry, kind, key, hook, **arguments):
                # A module behind two keys is asked twice and answers the same.
                found.setdefault((entry.dist, entry.target, bid.name), bid)
        except (PluginLoadError, PluginConflictError) as error:
            if registry.switches.strict:
                raise
            found["", "", key] = Refusal(key, (str(error),))
    return list(found.values())


def _ask(registry: Registry, kind: str, key: str, hook: str, **arguments: Any) -> list[Any]:
    answers = getattr(registry.only(kind, key), hook)(
        **arguments, options=registry.options(kind, key)
    )
    for answer in answers:
        if not _sound(answer):
            raise PluginLoadError(
                f"{kind}:{key} answered {hook} with {answer!r:.200}; an offer with a name, a number as "
                "score and, for attention, page sizes is wanted, or a Refusal with reasons"
            )
        registry.bidders[kind, answer.name] = registry.choose(kind, key)
    return list(answers)


def _sound(answer: object) -> bool:
    """Whether a bid can be compared with others; one that cannot must not spoil theirs."""
    from treadle.api.types import KernelOffer, Offer, Refusal

    match answer:
        case Offer(name=str(), score=int() | float(), page_sizes=[_, *_] as sizes):
            return all(isinstance(size, int) for size in sizes)
        case KernelOffer(name=str(), score=int() | float()):
            return True
        case Refusal(name=str(), reasons=tuple() | list() as reasons):
            return all(isinstance(reason, str) for reason in reasons)
    return False
