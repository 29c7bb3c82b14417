"""What is wrong with plugins, as values: the vocabulary of ``treadle doctor``.

Also everything that metadata tells about a plugin without importing it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlparse

import msgspec

from treadle.errors import PluginConflictError, PluginNotFoundError
from treadle.plugins import PluginManager
from treadle.plugins.entries import Entry, normal
from treadle.plugins.kinds import parse_group

__all__ = ("CODES", "Code", "Finding", "about_distribution", "editable_folder", "standing")

Code = Literal[
    "conflict",
    "crash",
    "cuda",
    "dependency",
    "generation",
    "hang",
    "heavy",
    "hook",
    "import",
    "options",
    "pin",
    "requirement",
    "signature",
    "slow",
    "stale",
    "target",
]

CODES: dict[Code, str] = {
    "conflict": "several distributions provide the key and nothing says which to take",
    "crash": "the process that imported it died",
    "cuda": "its import starts CUDA, which breaks forked workers and takes memory",
    "dependency": "a module or distribution that it needs is not installed",
    "generation": "it speaks another generation of the hook, or a kind that is unknown here",
    "hang": "its import did not end in time",
    "heavy": "its import brings a heavy module, which delays every start",
    "hook": "it does not implement the hook of the kind that it declares",
    "import": "its import raised",
    "options": "its TREADLE_OPTIONS cannot be used",
    "pin": "the key is pinned to a distribution that does not provide it",
    "requirement": "it does not want the installed version of something it needs",
    "signature": "it implements a hook that does not exist, or with arguments that do not",
    "slow": "its import takes long",
    "stale": "its pyproject.toml and its installed metadata differ: install it again",
    "target": "its entry point leads to nothing",
}
"""What each code means."""

WARNINGS: frozenset[Code] = frozenset({"heavy", "slow"})


class Finding(msgspec.Struct, frozen=True):
    """One thing that is wrong with one entry, and in words what to do."""

    code: Code
    text: str

    @property
    def fatal(self) -> bool:
        return self.code not in WARNINGS


def standing(plugins: PluginManager, entry: Entry) -> Iterator[Finding]:
    """What is wrong with an entry before it is imported, its distribution left aside."""
    if entry.state == "incompatible":
        yield Finding("generation", entry.why)
    if not entry.usable or plugins.kinds[entry.kind].mode == "always":
        return
    try:
        plugins.choose(entry.kind, entry.key)
    except PluginConflictError as error:
        yield Finding("conflict", str(error))
    except PluginNotFoundError as error:
        yield Finding("pin", str(error))


def unmet_requirements(dist: str) -> Iterator[Finding]:
    """Each ``Requires-Dist`` of a distribution that is absent, or has the wrong version."""
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        needs = metadata.requires(dist) or []
    except metadata.PackageNotFoundError:
        return  # a local file, or made for a test
    for text in needs:
        try:
            need = Requirement(text)
        except InvalidRequirement:
            continue
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        try:
            found = metadata.version(need.name)
        except metadata.PackageNotFoundError:
            yield Finding("dependency", f"{need.name} is not installed; pip install {need}")
            continue
        if not need.specifier.contains(found, prereleases=True):
            wanted = f"requires {need.name} {need.specifier}, installed is {found}"
            yield Finding("requirement", f"{wanted}; install versions that fit each other")


def stale(dist: str, project: Path) -> Iterator[Finding]:
    """How the entry points written in an editable project differ from those installed."""
    try:
        text = (project / "pyproject.toml").read_text(encoding="utf-8")
        written = written_groups(text)
    except OSError:
        yield Finding("stale", f"its folder {project} is gone; pip uninstall {dist}")
        return
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        yield Finding("stale", f"{project / 'pyproject.toml'} cannot be read: {error}")
        return
    installed = {
        (point.group, point.name): point.value
        for point in metadata.distribution(dist).entry_points
        if parse_group(point.group)
    }
    again = f"pip install -e {project}"
    for name in sorted(written.keys() | installed.keys()):
        ours, theirs = installed.get(name), written.get(name)
        if ours != theirs:
            shown = f"[{name[0]}] {name[1]}"
            how = (
                f"{shown} = {theirs!r} is written, but not installed"
                if ours is None
                else f"{shown} = {ours!r} is installed, but no longer written"
                if theirs is None
                else f"{shown} is {theirs!r} in pyproject.toml and {ours!r} as installed"
            )
            yield Finding("stale", f"{how}; {again}")


def written_groups(pyproject: str) -> dict[tuple[str, str], str]:
    """``(group, key) → target`` of treadle's groups in the text of a ``pyproject.toml``."""
    groups = tomllib.loads(pyproject).get("project", {}).get("entry-points", {})
    return {
        (group, key): target
        for group, keys in groups.items()
        if parse_group(group)
        for key, target in keys.items()
    }


def editable_folder(dist: str) -> Path | None:
    """The folder of a distribution that is installed in editable mode."""
    try:
        text = metadata.distribution(dist).read_text("direct_url.json")
        found = msgspec.json.decode(text) if text else {}
    except (metadata.PackageNotFoundError, msgspec.DecodeError):
        return None
    if not found.get("dir_info", {}).get("editable"):
        return None
    return Path(unquote(urlparse(found.get("url", "")).path))


def about_distribution(entry: Entry) -> Iterator[Finding]:
    """What is wrong with the distribution of an entry as it is installed."""
    if entry.file is not None:
        return
    yield from unmet_requirements(normal(entry.dist))
    folder = editable_folder(entry.dist)
    if folder is not None:
        yield from stale(entry.dist, folder)
