"""The examination behind ``treadle doctor``: every plugin in a process of its own, and the machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from treadle.plugins import machine
from treadle.plugins.entries import Entry, normal
from treadle.plugins.health import Finding, about_distribution, standing
from treadle.plugins.probe import Loaded, Request
from treadle.plugins.registry import Registry
from treadle.plugins.selection import Choice, Plan
from treadle.plugins.survey import Seen, Survey
from treadle.processes.child_process import ChildError, ask

__all__ = ("Checked", "Report", "check", "examine")

PROBE, SURVEY = "treadle.plugins.probe", "treadle.plugins.survey"
AT_ONCE = 4


class Checked(msgspec.Struct, frozen=True):
    """One entry. ``seconds`` is what the import took, ``None`` if it was not tried or failed."""

    id: str
    distribution: str
    version: str
    target: str
    state: str
    seconds: float | None
    findings: list[Finding]


class Report(msgspec.Struct, frozen=True):
    """What ``treadle doctor`` knows. ``problems`` are about the whole and not about one plugin."""

    machine: machine.Machine
    plugins: list[Checked]
    seen: Seen | None
    reports: list[str]
    problems: list[str]
    advice: list[str]

    def failed(self, strict: bool = False) -> bool:
        """Whether something must be repaired; ``strict``: also what is only slow."""
        found = [f for checked in self.plugins for f in checked.findings]
        return bool(self.problems) or any(strict or f.fatal for f in found)


def examine(
    registry: Registry,
    *,
    seconds: float = 30.0,
    specs: Sequence[str] = (),
    device: str = "auto",
    only: str | None = None,
) -> Report:
    """Import every usable plugin, each in a process that has ``seconds`` to end.

    ``specs`` name the hooks of other distributions (``module:class``). ``only`` is a distribution
    or a ``kind:key``: nothing else is imported, and the device is left alone.
    """
    chosen = [e for e in registry.entries if only is None or only in (e.id, normal(e.dist))]
    plugins, reports = check(registry, chosen, seconds=seconds, specs=specs)
    installed = {normal(e.dist) for e in registry.entries}
    found = machine.look(installed)
    seen, problems = None, []
    if only is None:
        try:
            seen = ask(SURVEY, Survey(_healthy(registry, plugins), device), Seen, seconds * 2)
        except ChildError as error:
            problems.append(f"asking for the device and the bids failed: {error}")
    tips = list(machine.advice(found, seen, installed))
    return Report(found, plugins, seen, reports, problems, tips)


def check(
    registry: Registry, entries: Iterable[Entry], *, seconds: float, specs: Sequence[str]
) -> tuple[list[Checked], list[str]]:
    """What is wrong with each of ``entries``, and what their plugins report."""
    chosen = list(entries)
    targets: dict[tuple[str, str], list[Entry]] = {}
    for entry in chosen:
        if entry.usable:
            targets.setdefault((entry.dist, str(entry.file or entry.target)), []).append(entry)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = pool.map(lambda same: _load(same, seconds, specs), targets.values())
        loaded = dict(zip(targets, answers, strict=True))
    reports = [
        f"{same[0].owner}: {line}" for at, same in targets.items() for line in loaded[at].report
    ]
    return [_checked(registry, entry, loaded) for entry in chosen], reports


def _load(entries: Sequence[Entry], seconds: float, specs: Sequence[str]) -> Loaded:
    choices = [Choice.of(e, e.kind, e.key) for e in entries]
    try:
        return ask(PROBE, Request(choices, list(specs)), Loaded, seconds)
    except ChildError as error:
        code = Finding("hang" if error.hung else "crash", f"importing it: {error}")
        return Loaded(-1.0, [code])


def _checked(registry: Registry, entry: Entry, loaded: dict[tuple[str, str], Loaded]) -> Checked:
    findings = [*standing(registry, entry), *about_distribution(entry)]
    answer = loaded.get((entry.dist, str(entry.file or entry.target)))
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
        str(entry.file or entry.target),
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


def _healthy(registry: Registry, plugins: Iterable[Checked]) -> Plan:
    """The plugins that can be imported without harm to the process that asks for bids."""
    broken = {(c.distribution, c.target) for c in plugins if c.state == "broken"}
    choices = registry.plan().choices
    return Plan([c for c in choices if (c.dist, c.file or c.target) not in broken])
