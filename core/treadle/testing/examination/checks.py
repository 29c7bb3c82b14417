"""The examination of plugins: each is imported in a separate process, where it may hang or crash."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from treadle.plugins import PluginManager
from treadle.plugins.entries import Entry
from treadle.testing.examination.child_process import ChildError, ask
from treadle.testing.examination.findings import Finding, distribution_findings, entry_findings
from treadle.testing.examination.listing import UNMET
from treadle.testing.examination.probe import ImportResult, Request

__all__ = ("PluginReport", "check")

PROBE = "treadle.testing.examination.probe"
MAX_PROCESSES = 4


class PluginReport(msgspec.Struct, frozen=True):
    """The findings of one entry. ``seconds`` is the time of the import, ``None`` if it was skipped or failed."""

    id: str
    distribution: str
    version: str
    target: str
    state: str
    seconds: float | None
    findings: list[Finding]


def check(
    plugins: PluginManager, entries: Iterable[Entry], *, seconds: float
) -> tuple[list[PluginReport], list[str]]:
    """Return the findings of each of ``entries``, and the report lines of their plugins."""
    entry_list = list(entries)
    targets: dict[str, list[Entry]] = {}
    found = {e.dist: list(distribution_findings(e)) for e in entry_list if e.state != "disabled"}
    unmet = {
        dist for dist, findings in found.items() if any(f.code == "dependency" for f in findings)
    }
    for entry in entry_list:
        if entry.usable and entry.dist not in unmet:
            targets.setdefault(entry.plugin, []).append(entry)
    with ThreadPoolExecutor(MAX_PROCESSES) as pool:
        answers = pool.map(lambda same: _load(same, seconds), targets.values())
        results = dict(zip(targets, answers, strict=True))
    reports = [
        f"{group[0].owner}: {line}"
        for plugin, group in targets.items()
        for line in results[plugin].report
    ]
    return [
        _plugin_report(plugins, entry, found.get(entry.dist, []), results.get(entry.plugin))
        for entry in entry_list
    ], reports


def _load(entries: Sequence[Entry], seconds: float) -> ImportResult:
    try:
        return ask(PROBE, Request([e.unloaded() for e in entries]), ImportResult, seconds)
    except ChildError as error:
        code = Finding("hang" if error.hung else "crash", f"importing it: {error}")
        return ImportResult(-1.0, [code])


def _plugin_report(
    plugins: PluginManager, entry: Entry, found: Iterable[Finding], answer: ImportResult | None
) -> PluginReport:
    findings = [*entry_findings(plugins, entry)]
    if entry.state != "disabled":  # nobody runs it, whatever is wrong with it
        findings += found
    time = None
    if answer is not None:
        findings += [*answer.findings, *answer.entry_findings.get(entry.id, ())]
        time = answer.seconds if answer.seconds >= 0 else None
    state: str = entry.state
    if any(f.fatal for f in (answer.findings if answer else ())):
        state = "broken"
    elif answer is not None:
        state = "loaded"
    elif entry.usable:
        state = UNMET
    return PluginReport(
        entry.id,
        entry.dist,
        entry.version,
        entry.source,
        state,
        time,
        _deduplicate(findings),
    )


def _deduplicate(findings: Iterable[Finding]) -> list[Finding]:
    """Drop repeated findings of one cause: a module that is missing is also an unmet requirement."""
    seen: dict[str, Finding] = {}
    for finding in findings:
        seen.setdefault(finding.text if finding.code != "dependency" else "dependency", finding)
    return list(seen.values())
