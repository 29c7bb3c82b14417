"""The metadata of installed distributions, which may be damaged without harm to anybody else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import metadata

__all__ = ("entry_points", "folder_name", "identity")

HEADER = re.compile(r"^(Name|Version):[ \t]*(\S+)[ \t]*$", re.MULTILINE)


def folder_name(dist: metadata.Distribution) -> str:
    """Return the name of a distribution as its folder is called, which costs no read."""
    path = getattr(dist, "_path", None)
    return str(dist.name) if path is None else str(path.stem.partition("-")[0])


def identity(dist: metadata.Distribution) -> tuple[str, str]:
    """Return name and version, without parsing the description; no version if they are damaged."""
    text = _text(dist, "METADATA") or _text(dist, "PKG-INFO")
    fields = dict(HEADER.findall(text.partition("\n\n")[0]))
    if len(fields) == 2:
        return fields["Name"], fields["Version"]
    return folder_name(dist), ""


def entry_points(dist: metadata.Distribution) -> Iterator[metadata.EntryPoint]:
    """Yield the entry points of a distribution, what is not UTF-8 in them replaced."""
    group = ""
    for line in map(str.strip, _text(dist, "entry_points.txt").splitlines()):
        name, sign, value = (part.strip() for part in line.partition("="))
        if line.startswith("["):
            group = line.strip("[]").strip()
        elif group and sign and not line.startswith("#"):
            yield metadata.EntryPoint(name, value, group)


def _text(dist: metadata.Distribution, name: str) -> str:
    try:
        return dist.read_text(name) or ""
    except UnicodeDecodeError as error:
        return error.object.decode(errors="replace")
