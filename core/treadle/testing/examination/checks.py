"""Examining plugins: each is imported in a process of its own, where it may hang or crash."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from treadle.plugins import PluginManager
from treadle.plugins.entries import Entry
from treadle.testing.examination.child_process import ChildError, ask
from treadle.testing.examination.findings import Finding, about_distribution, standing
from treadle.testing.examination.probe import Loaded, Request

__all__ = ("Checked", "check")

PROBE = "treadle.testing.examination.probe"
MAX_PROCESSES = 4


class Checked(msgspec.Struct, frozen=True):
    """One entry. ``seconds`` is what the import took, ``None`` if it was not tried or failed."""

    id: str
    distribution: str
    version: str
    target: str
    state: str
    seconds: float | None
    findings: list[Finding]


def check(
    plugins: PluginManager, entries: Iterable[Entry], *, seconds: float
) -> tuple[list[Checked], list[str]]:
    """What is wrong with each of ``entries``, and what their plugins report."""
    chosen = list(entries)
    targets: dict[str, list[Entry]] = {}
    for entry in chosen:
        if entry.usable:
            targets.setdefault(entry.plugin, []).append(entry)
    with ThreadPoolExecutor(MAX_PROCESSES) as pool:
        answers = pool.map(lambda same: _load(same, seconds), targets.values())
        loaded = dict(zip(targets, answers, strict=True))
    reports = [
        f"{same[0].owner}: {line}" for at, same in targets.items() for line in loaded[at].report
    ]
    return [_checked(plugins, entry, loaded) for entry in chosen], reports


def _load(entries: Sequence[Entry], seconds: float) -> Loaded:
    try:
        return ask(PROBE, Request([e.unloaded() for e in entries]), Loaded, seconds)
    except ChildError as error:
        code = Finding("hang" if error.hung else "crash", f"importing it: {error}")
        return Loaded(-1.0, [code])


def _checked(plugins: PluginManager, entry: Entry, loaded: dict[str, Loaded]) -> Checked:
    findings = [*standing(plugins, entry), *about_distribution(entry)]
    answer = loaded.get(entry.plugin)
    time = None
    if answer is not None:
        findings += [*answer.findings, *answer.own.get(entry.id, ())]
        time = answer.seconds if answer.seconds >= 0 else None
    state = entry.state
    if any(f.fatal for f in (answer.findings if answer else ())):
        state = "broken"
    elif answer is not None:
        state = "loaded"
    return Checked(
        entry.id,
        entry.dist,
        entry.version,
        entry.source,
        state,
        time,
        _once(findings),
    )


def _once(findings: Iterable[Finding]) -> list[Finding]:
    """Without a second word on one cause: a module that is missing is also an unmet requirement."""
    seen: dict[str, Finding] = {}
    for finding in findings:
        seen.setdefault(finding.text if finding.code != "dependency" else "dependency", finding)
    return list(seen.values())
