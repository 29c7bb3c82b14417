"""Checks of what plugins return: those of single methods, which the kinds name, and those that
follow from the annotation of a method.

A check gets the result and the arguments of the call. It returns the result to use, or raises
``TypeError`` or ``ValueError``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any

from treadle.api import types as t

__all__ = (
    "BY_ANNOTATION",
    "Check",
    "SortKey",
    "accepted_token",
    "any_result",
    "call_id",
    "decoded",
    "deltas",
    "edited_logits",
    "encoded",
    "experts_result",
    "hidden_states",
    "index_into",
    "is_offer",
    "latest_arrival",
    "linear_result",
    "named_tensor",
    "of_shape",
    "one_for_each_matcher",
    "page_sizes",
    "same_shape",
    "tool_grammar",
    "unexpected",
)

Check = Callable[..., Any]

MAX_ID_CHARS = 64
MAX_TOKENS_PER_CHAR = 256
MAX_CHARS_PER_TOKEN = 65_536


def unexpected(result: object, expected: str) -> TypeError:
    """Return the error for a result that is not ``expected``."""
    shape = getattr(result, "shape", None)
    description = f"a tensor {list(shape)}" if shape is not None else f"{result!r:.80}"
    return TypeError(f"it returned {description}; {expected} was expected")


def any_result(result: Any, *_: Any) -> Any:
    """Accept every result as it is."""
    return result


def named_tensor(item: Any) -> tuple[str, Any]:
    name, tensor = item
    if not isinstance(name, str) or not hasattr(tensor, "shape"):
        raise unexpected(item, "the name of a tensor and the tensor")
    return name, tensor


def of_shape(y: Any, shape: Sequence[int]) -> Any:
    if y.shape == shape:
        return y
    raise unexpected(y, f"a tensor {list(shape)}")


def same_shape(y: Any, q: Any, *_: Any) -> Any:
    return of_shape(y, q.shape)


def page_sizes(shape: Any, *_: Any) -> tuple[int, ...]:
    if isinstance(shape, Sequence) and all(isinstance(n, int) and n > 0 for n in shape):
        return tuple(shape)
    raise unexpected(shape, "a tuple of sizes")


def hidden_states(hidden: Any, ids: Any, positions: Any, forward_ctx: t.ForwardContext) -> Any:
    shape: tuple[int, ...] = getattr(hidden, "shape", ())
    indices = ids if forward_ctx.logits_indices is None else forward_ctx.logits_indices
    if len(shape) == 2 and shape[0] in (len(ids), len(indices)):
        return hidden
    raise unexpected(hidden, f"a tensor [{len(ids)}, hidden]")


def edited_logits(y: Any, logits: Any, *_: Any) -> Any:
    if all(getattr(y, n, None) == getattr(logits, n) for n in ("shape", "dtype", "device")):
        return y
    raise unexpected(y, f"a tensor {list(logits.shape)} of {logits.dtype}")


def linear_result(y: Any, module: Any, *_: Any) -> Any:
    if y.shape[-1] == module.out_features:
        return y
    raise unexpected(y, f"a tensor whose last size is {module.out_features}")


def experts_result(y: Any, module: Any, x: Any, topk_ids: Any, *_: Any) -> Any:
    return of_shape(y, (*topk_ids.shape, x.shape[1]))


class SortKey:
    """A tuple of finite numbers, equally long for every request."""

    def __init__(self) -> None:
        self.length = 0

    def __call__(self, result: Any, *_: Any) -> tuple[float, ...]:
        key = tuple(float(value) for value in result)
        if not key or not all(map(isfinite, key)):
            raise ValueError(f"{key!r} is not a sort key; a tuple of finite numbers is")
        if len(key) != (self.length or len(key)):
            raise ValueError(f"{key!r} must have {self.length} numbers, like the keys before it")
        self.length = len(key)
        return key


def index_into(index: Any, running: Sequence[Any]) -> int:
    position = int(index)
    if 0 <= position < len(running):
        return position
    raise IndexError(f"victim {index} is not one of {len(running)} requests")


def latest_arrival(error: BaseException, running: Sequence[t.QueuedRequest]) -> int:
    return max(range(len(running)), key=lambda i: running[i].arrival_time)


def deltas(deltas: Any, *_: Any) -> list[t.Delta]:
    """What a parser returned, as a list; half a surrogate pair cannot be sent."""
    result: list[t.Delta] = list(deltas)
    for delta in result:
        match delta:
            case t.TextDelta(str(text)) | t.ReasoningDelta(str(text)):
                text.encode()
            case t.ToolCallDelta(int(index), str() | None as name, str(text)) if index >= 0:
                text.encode()
                (name or "").encode()
            case _:
                raise unexpected(delta, "a delta that can be sent")
    return result


def tool_grammar(grammar: Any, *_: Any) -> t.GrammarSpec | None:
    match grammar:
        case None:
            return None
        case t.GrammarSpec(kind=str(), source=str(), options={**options}):
            match options.get("heads", ("", "")), options.get("reasoning", ""):
                case [str(), str()], str():
                    return grammar
    raise unexpected(grammar, "a grammar whose source, and two heads if any, are texts")


def call_id(made: Any) -> str:
    if 0 < len(made) <= MAX_ID_CHARS and made.isprintable():
        return str(made)
    raise unexpected(made, f"a printable text of at most {MAX_ID_CHARS} characters")


def accepted_token(result: Any, token: int) -> bool:
    if result:
        return True
    raise ValueError(f"the grammar does not allow token {token}, which its mask allowed")


def one_for_each_matcher(results: Any, matchers: Sequence[Any], *_: Any) -> list[Any]:
    is_list = isinstance(results, list) and len(results) == len(matchers)
    if is_list and set(map(type, results)) <= {bool, type(None)}:
        return list(results)
    raise unexpected(results, f"a list with True, False or None for each of {len(matchers)}")


def is_offer(answer: object) -> bool:
    """Return whether an answer of a backend can be compared with others: an offer, or a refusal."""
    match answer:
        case t.AttentionOffer(name=str(), score=int() | float(), page_sizes=[_, *_] as sizes):
            return all(isinstance(size, int) for size in sizes)
        case t.KernelOffer(name=str(), score=int() | float()):
            return True
        case t.CommunicatorOffer(name=str(), score=int() | float()):
            return True
        case t.Refusal(name=str(), reasons=tuple() | list() as reasons):
            return all(isinstance(reason, str) for reason in reasons)
    return False


def instance_of(*kinds: type, description: str) -> Check:
    """Return a check that accepts instances of ``kinds``."""

    def check(result: Any, *_: Any) -> Any:
        if isinstance(result, kinds):
            return result
        raise unexpected(result, description)

    return check


def ids(result: Any, *_: Any) -> list[int]:
    if isinstance(result, list) and set(map(type, result)) <= {int}:
        return result
    raise unexpected(result, "a list of ints")


def encoded(result: Any, text: str, *_: Any) -> list[int]:
    """Token ids that are not out of proportion to the text."""
    tokens = ids(result)
    if len(tokens) > MAX_TOKENS_PER_CHAR * (len(text) + 16):
        raise ValueError(
            f"it made {len(tokens)} tokens of {len(text)} characters; {MAX_TOKENS_PER_CHAR} are "
            "allowed for each"
        )
    return tokens


def decoded(result: Any, tokens: Any = 0, *_: Any) -> str:
    """A text that is not out of proportion to the tokens, or the token, that it is made of."""
    if not isinstance(result, str):
        raise unexpected(result, "a str")
    if len(result) > MAX_CHARS_PER_TOKEN:
        count = len(tokens) if isinstance(tokens, Sequence) else 1
        if len(result) > MAX_CHARS_PER_TOKEN * count:
            raise ValueError(
                f"it made {len(result)} characters of {count} tokens; {MAX_CHARS_PER_TOKEN} are "
                "allowed for each"
            )
    return result


def flag(result: Any, *_: Any) -> Any:
    if callable(result):  # it would always be true
        raise TypeError("it is a method; it must be a property")
    return result


BY_ANNOTATION: Mapping[str, Check] = {
    "str": instance_of(str, description="a str"),
    "str | None": instance_of(str, type(None), description="a str or None"),
    "bytes": instance_of(bytes, description="bytes"),
    "list[int]": ids,
    "frozenset[int]": lambda result, *_: frozenset(result),
    "bool": flag,
}
