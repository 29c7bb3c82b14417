"""Kernels that are tried before they serve, because nothing but a trial can tell whether they work."""

from __future__ import annotations

from collections.abc import Callable
from logging import Logger

__all__ = ("passes",)


def passes(trial: Callable[[], bool], log: Logger, warning: str) -> bool:
    """Whether ``trial`` says that results are right. If not, or if it raises, ``log`` gets ``warning``, in
    which ``%s`` stands for the reason; the caller then does without the kernel."""
    try:
        if trial():
            return True
        reason = "its results are wrong"
    except Exception as error:  # compilers and drivers raise whatever they like
        reason = f"{type(error).__name__}: {error}"
    log.warning(warning, reason)
    return False
