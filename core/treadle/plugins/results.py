"""Checks of what methods of plugins return, from the annotations of their protocols."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from treadle.api.plugin_kind import unexpected

__all__ = ("check_of",)

Check = Callable[..., Any]


def _instance_of(*types: type, words: str) -> Check:
    """Return a check that accepts instances of ``types``."""

    def check(result: Any, *_: Any) -> Any:
        if isinstance(result, types):
            return result
        raise unexpected(result, words)

    return check


def _ids(result: Any, *_: Any) -> list[int]:
    if isinstance(result, list) and set(map(type, result)) <= {int}:
        return result
    raise unexpected(result, "a list of ints")


def _flag(result: Any, *_: Any) -> Any:
    if callable(result):  # it would always be true
        raise TypeError("it is a method; it must be a property")
    return result


_BY_ANNOTATION: dict[str, Check] = {
    "str": _instance_of(str, words="a str"),
    "str | None": _instance_of(str, type(None), words="a str or None"),
    "bytes": _instance_of(bytes, words="bytes"),
    "list[int]": _ids,
    "frozenset[int]": lambda result, *_: frozenset(result),
    "bool": _flag,
}


def check_of(annotation: str) -> Check | None:
    """Return the check of a builtin type; ``None`` if results of the type are not checked."""
    return _BY_ANNOTATION.get(annotation)
