"""The findings of ``treadle doctor``: codes and texts of what is wrong with plugins.

Also everything that metadata tells about a plugin without importing it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlparse

import msgspec

from treadle.api.plugin_kind import parse_group
from treadle.errors import PluginConflictError, PluginNotFoundError
from treadle.plugins import PluginManager
from treadle.plugins.entries import Entry, normal

__all__ = (
    "CODES",
    "Code",
    "Finding",
    "distribution_findings",
    "editable_folder",
    "entry_findings",
    "loses_to",
    "requirement_findings",
)

Code = Literal[
    "adapted",
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
    "adapted": "it speaks the generation before, and a later version will not call it any more",
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

WARNINGS: frozenset[Code] = frozenset({"adapted", "heavy", "slow"})


class Finding(msgspec.Struct, frozen=True):
    """One problem of one entry, with a text that says what to do."""

    code: Code
    text: str

    @property
    def fatal(self) -> bool:
        return self.code not in WARNINGS


def entry_findings(plugins: PluginManager, entry: Entry) -> Iterator[Finding]:
    """Yield the findings of an entry that need no import, without those of its distribution."""
    if entry.state == "incompatible" and not spoken_elsewhere(entry, plugins):
        yield Finding("generation", entry.reason)
    elif entry.adapted and entry.usable:
        yield Finding("adapted", f"{entry.reason}: see docs/project/migration.md")
    if not entry.usable or plugins.kinds[entry.kind].mode == "always":
        return
    try:
        owner = plugins.choose(entry.kind, entry.key)
        if loses_to(entry, owner, plugins):
            yield Finding(
                "conflict",
                f"{owner.owner} provides {entry.id}, and is used; --pin-plugin "
                f"{entry.id}={entry.dist} uses this one",
            )
    except PluginConflictError as error:
        yield Finding("conflict", str(error))
    except PluginNotFoundError as error:
        yield Finding("pin", str(error))


def spoken_elsewhere(entry: Entry, plugins: PluginManager) -> bool:
    """Return whether the distribution declares the key in the generation that treadle speaks, too."""
    same_key = [e for e in plugins.entries if (e.id, e.dist) == (entry.id, entry.dist)]
    return any(e.state != "incompatible" for e in same_key)


def loses_to(entry: Entry, owner: Entry, plugins: PluginManager) -> bool:
    """Return whether an entry claims a key that its owner keeps without a decision of the user."""
    is_decided = owner.override or entry.override or entry.id in plugins.switches.pins
    return owner is not entry and not is_decided


def requirement_findings(
    dist: str, version: Callable[[str], str] = metadata.version
) -> Iterator[Finding]:
    """Each ``Requires-Dist`` of a distribution that is absent, or has the wrong version.

    ``version`` returns that of an installed distribution.
    """
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        requirements = metadata.requires(dist) or []
    except (metadata.PackageNotFoundError, UnicodeDecodeError, AttributeError):
        return  # a local file, or made for a test; AttributeError is that of importlib_metadata
    for text in requirements:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            installed_version = version(requirement.name)
        except metadata.PackageNotFoundError:
            yield Finding(
                "dependency",
                f"it needs {requirement.name}, which is not installed; pip install '{requirement}'",
            )
            continue
        if not requirement.specifier.contains(installed_version, prereleases=True):
            conflict = f"requires {requirement.name} {requirement.specifier}, installed is {installed_version}"
            yield Finding("requirement", f"{conflict}; install versions that fit each other")


def stale_findings(dist: str, project: Path) -> Iterator[Finding]:
    """Yield the differences between an editable project's entry points and the installed ones."""
    try:
        text = (project / "pyproject.toml").read_text(encoding="utf-8")
        written = declared_entry_points(text)
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
    command = f"pip install -e {project}"
    for name in sorted(written.keys() | installed.keys()):
        installed_value, written_value = installed.get(name), written.get(name)
        if installed_value != written_value:
            label = f"[{name[0]}] {name[1]}"
            difference = (
                f"{label} = {written_value!r} is written, but not installed"
                if installed_value is None
                else f"{label} = {installed_value!r} is installed, but no longer written"
                if written_value is None
                else f"{label} is {written_value!r} in pyproject.toml and {installed_value!r} as installed"
            )
            yield Finding("stale", f"{difference}; {command}")


def declared_entry_points(pyproject: str) -> dict[tuple[str, str], str]:
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
        data = msgspec.json.decode(text) if text else {}
    except (metadata.PackageNotFoundError, msgspec.DecodeError):
        return None
    if not data.get("dir_info", {}).get("editable"):
        return None
    return Path(unquote(urlparse(data.get("url", "")).path))


def distribution_findings(entry: Entry) -> Iterator[Finding]:
    """Yield the findings of the installed distribution of an entry."""
    if entry.file is not None:
        return
    yield from requirement_findings(normal(entry.dist))
    folder = editable_folder(entry.dist)
    if folder is not None:
        yield from stale_findings(entry.dist, folder)
