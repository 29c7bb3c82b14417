"""What ``treadle doctor`` reports: the findings of every plugin, and the machine."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from treadle.plugins import PluginManager
from treadle.plugins.entries import normal
from treadle.plugins.selection import PluginSelection
from treadle.testing.examination.checks import Checked, check
from treadle.testing.examination.child_process import ChildError, ask
from treadle_cli.doctor import machine
from treadle_cli.doctor.survey import DeviceReport, Survey

__all__ = ("Report", "examine")

SURVEY = "treadle_cli.doctor.survey"


class Report(msgspec.Struct, frozen=True):
    """What ``treadle doctor`` knows. ``problems`` are about the whole and not about one plugin."""

    machine: machine.Machine
    plugins: list[Checked]
    device: DeviceReport | None
    reports: list[str]
    problems: list[str]
    advice: list[str]

    def failed(self, strict: bool = False) -> bool:
        """Whether something must be repaired; ``strict``: also what is only slow."""
        found = [f for checked in self.plugins for f in checked.findings]
        return bool(self.problems) or any(strict or f.fatal for f in found)


def examine(
    plugins: PluginManager,
    *,
    seconds: float = 30.0,
    device: str = "auto",
    only: str | None = None,
) -> Report:
    """Import every usable plugin, each in a process that has ``seconds`` to end.

    ``only`` is a distribution or a ``kind:key``: nothing else is imported, and the device is left alone.
    """
    chosen = [e for e in plugins.entries if only is None or only in (e.id, normal(e.dist))]
    examined, reports = check(plugins, chosen, seconds=seconds)
    installed = {normal(e.dist) for e in plugins.entries}
    found = machine.look(installed)
    seen, problems = None, []
    if only is None:
        try:
            seen = ask(
                SURVEY, Survey(_healthy(plugins, examined), device), DeviceReport, seconds * 2
            )
        except ChildError as error:
            problems.append(f"asking for the device and the bids failed: {error}")
    tips = list(machine.advice(found, seen, installed))
    return Report(found, examined, seen, reports, problems, tips)


def _healthy(plugins: PluginManager, examined: Iterable[Checked]) -> PluginSelection:
    """The plugins that can be imported without harm to the process that asks for bids."""
    broken = {(c.distribution, c.target) for c in examined if c.state == "broken"}
    choices = plugins.selection().choices
    return PluginSelection([c for c in choices if (c.dist, c.source) not in broken])
