"""The metadata of installed distributions, which may be damaged without harm to anybody else."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

__all__ = ("entry_points", "identity")


def identity(dist: metadata.Distribution) -> tuple[str, str]:
    """Return name and version of a distribution; no version if its metadata are damaged."""
    try:
        about = dist.metadata  # parsed by each access
        if (name := about["Name"]) and (version := about["Version"]):
            return name, version
    except (KeyError, ValueError):
        pass
    return getattr(dist, "_path", Path("unknown")).name.partition("-")[0], ""


def entry_points(dist: metadata.Distribution) -> list[metadata.EntryPoint]:
    """Return the entry points of a distribution, what is not UTF-8 in them replaced."""
    try:
        return list(dist.entry_points)
    except (TypeError, ValueError) as error:
        text = (
            error.object.decode(errors="replace") if isinstance(error, UnicodeDecodeError) else ""
        )
        groups = (part.partition("]") for part in text.split("[")[1:])
        lines = ((g, line.split("=", 1)) for g, _, rest in groups for line in rest.splitlines())
        return [
            metadata.EntryPoint(pair[0].strip(), pair[1].strip(), group)
            for group, pair in lines
            if len(pair) == 2
        ]
