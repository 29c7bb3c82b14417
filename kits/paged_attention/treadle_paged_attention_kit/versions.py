"""Versions of installed distributions: an import of some of them takes seconds, metadata does not."""

from __future__ import annotations

import re
from importlib import metadata

__all__ = ("installed_version", "version_text")


def installed_version(distribution: str) -> tuple[int, ...] | None:
    """Return the first three numbers of the installed version, or ``None`` without one."""
    try:
        return tuple(map(int, re.findall(r"\d+", metadata.version(distribution))[:3]))
    except metadata.PackageNotFoundError:
        return None


def version_text(version: tuple[int, ...]) -> str:
    """Return ``version`` as it is written: ``0.0.35``."""
    return ".".join(map(str, version))
