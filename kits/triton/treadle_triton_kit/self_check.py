"""Checks of kernels before they are used: only a run shows whether one works on a device."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from logging import Logger
from typing import ParamSpec

from treadle_triton_kit.compile_ahead import is_collecting

__all__ = ("checked_once", "self_check")

P = ParamSpec("P")


def checked_once(check: Callable[P, bool]) -> Callable[P, bool]:
    """Decorate a function that tries a kernel: once in a process for the same arguments.

    What it says while kernels are compiled ahead is not kept.
    """
    kept = cache(check)

    @wraps(check)
    def call(*args: P.args, **kwargs: P.kwargs) -> bool:
        return check(*args, **kwargs) if is_collecting() else kept(*args, **kwargs)  # type: ignore[arg-type]

    call.cache_clear = kept.cache_clear  # type: ignore[attr-defined]
    return call


def self_check(check: Callable[[], bool], log: Logger, warning: str) -> bool:
    """Return whether ``check`` returns true.

    If it returns false or raises, ``warning`` is logged with the reason in place of ``%s``; the caller
    then does without the kernel. While kernels are compiled ahead, nothing is known, and it returns true.
    """
    try:
        if check() or is_collecting():
            return True
        reason = "its results are wrong"
    except Exception as error:  # compilers and drivers raise errors of any type
        if is_collecting():
            return True
        reason = f"{type(error).__name__}: {error}"
    log.warning(warning, reason)
    return False
