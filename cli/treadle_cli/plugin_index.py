"""``treadle plugin index``: a page that lists distributions of plugins, and the same as JSON.

Everything is read from the metadata of the installed distributions; only the suites run code of
the plugins. The metadata are foreign: the page escapes them, and links to web addresses only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from html import escape
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from string import Template

import msgspec
from packaging.requirements import InvalidRequirement, Requirement

from treadle.errors import ConfigError
from treadle.plugins import PluginManager
from treadle.plugins.entries import normal
from treadle.testing.examination.listing import Row, rows

__all__ = ("IndexedDistribution", "IndexedPlugin", "survey", "write")

RESULTS = {None: "not run", True: "passes", False: "fails"}


class IndexedPlugin(msgspec.Struct, frozen=True):
    """One key. ``suite`` is ``passes``, ``fails`` or ``not run``."""

    kind: str
    key: str
    generation: int | None
    state: str
    note: str
    suite: str


class IndexedDistribution(msgspec.Struct, frozen=True):
    """One distribution; ``core`` is the range of treadle-core that it asks for."""

    name: str
    version: str
    summary: str
    license: str
    url: str
    core: str
    plugins: list[IndexedPlugin]


def survey(
    plugins: PluginManager, names: Iterable[str], run_suite: Callable[[str], bool] | None
) -> list[IndexedDistribution]:
    """Return what the distributions ``names`` provide, by name; of all, if there are no names.

    ``run_suite`` returns whether ``kind:key`` passes; ``None`` leaves the suites out. Raises
    ``ConfigError`` for a distribution that provides no plugins here.
    """
    by_dist: dict[str, list[Row]] = {}
    for row in rows(plugins):
        by_dist.setdefault(normal(row.distribution), []).append(row)
    chosen = sorted({normal(name) for name in names} or by_dist)
    if missing := [name for name in chosen if name not in by_dist]:
        raise ConfigError(
            f"no plugins come from {', '.join(missing)}; install what the index is to list, or name "
            f"some of: {', '.join(sorted(by_dist))}"
        )
    generations = {(e.kind, e.key, normal(e.dist)): e.generation for e in plugins.entries}
    found = []
    for name in chosen:
        entries = [
            IndexedPlugin(
                row.kind,
                row.key,
                generations[row.kind, row.key, normal(name)],
                row.state,
                row.note,
                RESULTS[
                    run_suite(f"{row.kind}:{row.key}") if run_suite and _runs(row.state) else None
                ],
            )
            for row in by_dist[name]
        ]
        found.append(_distribution(name, by_dist[name][0].version, entries))
    return found


def write(folder: Path, distributions: list[IndexedDistribution]) -> None:
    """Write ``index.html`` and ``index.json``. Raises ``ConfigError`` if that is not possible."""
    template = Template((files("treadle_cli") / "index.html.in").read_text(encoding="utf-8"))
    page = template.substitute(rows="\n".join(_rows(distributions)), count=len(distributions))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "index.html").write_text(page, encoding="utf-8")
        (folder / "index.json").write_bytes(
            msgspec.json.format(msgspec.json.encode(distributions)) + b"\n"
        )
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}") from error


def _runs(state: str) -> bool:
    return state in ("ready", "loaded")


def _read(fields: metadata.PackageMetadata, name: str) -> str:
    """Return a field or nothing; readers of metadata differ in what ``fields[name]`` does without it."""
    return next(iter(fields.get_all(name) or ()), "")


def _distribution(name: str, version: str, plugins: list[IndexedPlugin]) -> IndexedDistribution:
    try:
        about = metadata.distribution(name)
        fields, requirements = about.metadata, about.requires or []
    except (metadata.PackageNotFoundError, UnicodeDecodeError, AttributeError):
        # A local file, or damaged metadata, of which importlib_metadata makes None.
        return IndexedDistribution(name, version, "", "", "", "", plugins)
    urls = [_read(fields, "Home-page")]
    urls += [line.partition(",")[2].strip() for line in fields.get_all("Project-URL") or []]
    return IndexedDistribution(
        name,
        version,
        _read(fields, "Summary"),
        _read(fields, "License-Expression") or _read(fields, "License"),
        next((url for url in urls if url.startswith(("https://", "http://"))), ""),
        next(_core_ranges(requirements), ""),
        plugins,
    )


def _core_ranges(requirements: Iterable[str]) -> Iterator[str]:
    for text in requirements:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if normal(requirement.name) == "treadle-core":
            yield str(requirement.specifier)


def _rows(distributions: Iterable[IndexedDistribution]) -> Iterator[str]:
    for dist in distributions:
        name = escape(f"{dist.name} {dist.version}")
        if dist.url:
            name = f'<a href="{escape(dist.url)}" rel="nofollow">{name}</a>'
        about = f"{name}<br><small>{escape(dist.summary)}</small>"
        span = f' rowspan="{len(dist.plugins)}"'
        first = f"<td{span}>{about}</td><td{span}>{escape(dist.core)}</td><td{span}>{escape(dist.license)}</td>"
        for plugin in dist.plugins:
            generation = f" v{plugin.generation}" if plugin.generation else ""
            state = plugin.note if plugin.state not in ("ready", "loaded") else ""
            suite = f'<td class="{plugin.suite.split()[0]}">{plugin.suite}</td>'
            cells = (
                f"<td>{escape(plugin.kind)}{generation}</td><td>{escape(plugin.key)}</td>{suite}"
            )
            yield f"<tr>{first}{cells}<td>{escape(state)}</td></tr>"
            first = ""
