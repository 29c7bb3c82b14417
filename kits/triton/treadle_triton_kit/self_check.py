"""Checks of kernels before they are used: only a run shows whether one works on a device."""

from __future__ import annotations

from collections.abc import Callable
from logging import Logger

__all__ = ("self_check",)


def self_check(check: Callable[[], bool], log: Logger, warning: str) -> bool:
    """Return whether ``check`` returns true.

    If it returns false or raises, ``warning`` is logged with the reason in place of ``%s``; the caller
    then does without the kernel.
    """
    try:
        if check():
            return True
        reason = "its results are wrong"
    except Exception as error:  # compilers and drivers raise errors of any type
        reason = f"{type(error).__name__}: {error}"
    log.warning(warning, reason)
    return False
