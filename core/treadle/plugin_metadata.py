"""The metadata of installed distributions, which may be damaged without harm to anybody else."""

from __future__ import annotations

from importlib import metadata

__all__ = ("entry_points", "folder_name", "identity")


def folder_name(dist: metadata.Distribution) -> str:
    """Return the name of a distribution as its folder is called, which costs no read."""
    path = getattr(dist, "_path", None)
    return str(dist.name) if path is None else str(path.stem.partition("-")[0])


def identity(dist: metadata.Distribution) -> tuple[str, str]:
    """Return name and version of a distribution; no version if its metadata are damaged."""
    try:
        about = dist.metadata  # parsed by each access
        if (name := about["Name"]) and (version := about["Version"]):
            return name, version
    except (KeyError, ValueError):
        pass
    return folder_name(dist), ""


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
