"""What ``treadle doctor`` reports: the findings of every plugin, and the machine."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from treadle.plugins import PluginManager, PluginSelection
from treadle.plugins.entries import normal
from treadle.testing.examination.checks import PluginReport, check
from treadle.testing.examination.child_process import ChildError, ask
from treadle.testing.examination.listing import UNMET
from treadle_cli.doctor import machine
from treadle_cli.doctor.survey import DeviceReport, Survey

__all__ = ("Report", "examine")

SURVEY = "treadle_cli.doctor.survey"


class Report(msgspec.Struct, frozen=True):
    """The result of ``treadle doctor``. ``problems`` concern no single plugin."""

    machine: machine.Machine
    plugins: list[PluginReport]
    device: DeviceReport | None
    reports: list[str]
    problems: list[str]
    advice: list[str]

    def has_failures(self, strict: bool = False) -> bool:
        """Whether something must be repaired; ``strict``: also what is only slow."""
        findings = [f for checked in self.plugins for f in checked.findings]
        return bool(self.problems) or any(strict or f.fatal for f in findings)


def examine(
    plugins: PluginManager,
    *,
    seconds: float = 30.0,
    device: str = "auto",
    target: str | None = None,
) -> Report:
    """Import every usable plugin, each in a process that has ``seconds`` to end.

    ``target`` is a distribution or a ``kind:key``: nothing else is imported, and the device is left alone.
    """
    entries = [e for e in plugins.entries if target is None or target in (e.id, normal(e.dist))]
    results, reports = check(plugins, entries, seconds=seconds)
    installed = {normal(e.dist) for e in plugins.entries}
    machine_info = machine.inspect_machine(installed)
    device_report, problems = None, []
    if target is None:
        try:
            device_report = ask(
                SURVEY, Survey(_healthy(plugins, results), device), DeviceReport, seconds * 2
            )
        except ChildError as error:
            problems.append(f"the report of the device and of the backends' offers failed: {error}")
    tips = list(machine.advice(machine_info, device_report, installed))
    return Report(machine_info, results, device_report, reports, problems, tips)


def _healthy(plugins: PluginManager, results: Iterable[PluginReport]) -> PluginSelection:
    """Return the plugins that can be imported in the process that collects the offers."""
    broken = {(c.distribution, c.target) for c in results if c.state in ("broken", UNMET)}
    choices = plugins.selection().choices
    return PluginSelection([c for c in choices if (c.dist, c.source) not in broken])
