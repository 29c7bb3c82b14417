"""Projects to begin a plugin with: plain files with ``string.Template`` marks, one folder a kind.

A file ``NAME.in`` becomes ``NAME``. Every folder holds ``__init__.py.in`` (the hook),
``test.py.in`` (the conformance test) and ``use.md.in``, a part of the README: what the plugin
changes where it is installed, how to try it, and what to change first. ``project`` is around all
of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from string import Template

from treadle.errors import ConfigError
from treadle.known_plugins import DISTRIBUTIONS
from treadle.loading.sources import parse_ref
from treadle.plugins import installed_kinds
from treadle.plugins.entries import normal

__all__ = ("render",)

KEY = re.compile(r"[A-Za-z]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
MORE = {
    "server": ["treadle-server"],
    "commands": ["typer>=0.26"],
    "tool_parsers": ["treadle-parsing-kit"],
    "reasoning_parsers": ["treadle-parsing-kit"],
    "models": ["treadle-layers-kit"],
    "kernel_ops": ["treadle-layers-kit"],
    "quantization": ["treadle-layers-kit"],
}


def render(kind: str, key: str, folder: Path) -> Path:
    """Write a project that provides ``kind:key`` into a new folder of ``folder``; return it.

    Raises ``ConfigError`` for an unknown kind, an impossible key, a name that another distribution
    has, and a folder that is there or cannot be written.
    """
    if kind not in installed_kinds():
        raise ConfigError(
            f"there is no plugin kind {kind!r}; known kinds: {', '.join(installed_kinds())}"
        )
    _check_key(kind, key)
    templates = files("treadle_cli") / "templates"
    variables = _template_variables(kind, key)
    variables["use"] = Template((templates / kind / "use.md.in").read_text("utf-8")).substitute(
        variables
    )
    project = folder / variables["dist"]
    package = project / variables["package"]
    targets = {
        "test.py.in": project / "tests" / "test_conformance.py",
        "workflow.yml.in": project / ".github" / "workflows" / "test.yml",
    }
    try:
        if project.exists():
            raise ConfigError(f"{project} exists; remove it or choose another name")
        for source in _sources(templates / "project"):
            target = targets.get(source.name, project / _name(source))
            _write(target, source, variables)
        for source in _sources(templates / kind):
            _write(targets.get(source.name, package / _name(source)), source, variables)
        (package / "py.typed").touch()
    except OSError as error:
        raise ConfigError(f"{project} cannot be written: {error.strerror}") from error
    return project


def _check_key(kind: str, key: str) -> None:
    if not KEY.fullmatch(key):
        raise ConfigError(
            f"the key is {key!r}; it begins with a letter, ends with a letter or digit, and has "
            "letters, digits, '.', '-' and '_' between"
        )
    if kind == "model_sources" and parse_ref(f"{key}:x").scheme != key:
        raise ConfigError(
            f"the key is {key!r}; a model source's is the scheme of {key}:path, in lower case and "
            "without '_'"
        )
    dist = normal(f"treadle-{key}")
    if dist in DISTRIBUTIONS:
        raise ConfigError(
            f"{dist}, which {key!r} makes, is a distribution of treadle; choose another"
        )
    try:
        installed_version = version(dist)
    except PackageNotFoundError:
        return
    raise ConfigError(
        f"{dist} {installed_version} is installed; uninstall it or choose another name"
    )


def _template_variables(kind: str, key: str) -> dict[str, str]:
    dist = normal(f"treadle-{key}")
    major, minor = version("treadle-core").split(".")[:2]
    versions = f">={major}.{minor},<{major}.{int(minor) + 1}"
    package, declared = dist.replace("-", "_"), installed_kinds()[kind]
    return {
        "kind": kind,
        "key": key,
        "dist": dist,
        "package": package,
        "target": f"{package}:Extension" if kind == "extensions" else package,
        "title": "".join(part.title() for part in re.split(r"[-_.]+", key)),
        "group": declared.group + f".v{declared.generation}" * (declared.generation > 1),
        "core": f"treadle-core{versions}",
        "cli": f"treadle-cli{versions}",
        "badge": f"{kind.replace('_', '__')}%20v{declared.generation}",
        "more": "".join(f', "{requirement}"' for requirement in MORE.get(kind, ())),
    }


def _sources(folder: Traversable) -> Iterator[Traversable]:
    """Its files, without the part of the README."""
    sources = (f for f in folder.iterdir() if f.name.endswith(".in") and f.name != "use.md.in")
    yield from sorted(sources, key=lambda f: f.name)


def _name(source: Traversable) -> str:
    return source.name.removesuffix(".in")


def _write(target: Path, source: Traversable, variables: dict[str, str]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    text = source.read_text(encoding="utf-8")
    target.write_text(Template(text).substitute(variables), encoding="utf-8")
