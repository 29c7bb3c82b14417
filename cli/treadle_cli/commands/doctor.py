"""``treadle doctor``: whether every plugin works, what runs on this machine, and what to install."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from treadle.api import impl
from treadle.plugins import PluginManager
from treadle_cli.flags import PLUGINS, Options, with_flags
from treadle_cli.help import single_command

if TYPE_CHECKING:
    from treadle_cli.doctor.report import Report
    from treadle_cli.doctor.survey import BackendReport

__all__ = ("treadle_command",)


@with_flags(PLUGINS)
def doctor(
    *,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings fail too.")] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", help="Longest import of one plugin.")
    ] = 30.0,
    options: Options,
) -> None:
    """Load every plugin in a separate process, and report its problems and each backend's offer.

    The exit code is 0 if nothing is wrong, else 1.
    """
    from treadle_cli.doctor.report import examine

    report = examine(PluginManager(options.struct(PLUGINS)), seconds=timeout)
    failed = report.has_failures(strict)
    if json:
        print(msgspec.json.encode({"ok": not failed, **msgspec.structs.asdict(report)}).decode())
    else:
        for line in _report_lines(report):
            sys.stdout.write(f"{line}\n")
    if failed:
        raise typer.Exit(1)


FALLBACK_NAMES = {"kernel": "treadle's own", "ranks": "torch.distributed"}
"""What is used if no backend offers."""


def _report_lines(report: Report) -> Iterator[str]:
    machine, device = report.machine, report.device
    yield f"python    {machine.python} on {machine.platform}"
    yield f"versions  {', '.join(f'{n} {v}' for n, v in machine.versions.items())}"
    if machine.gpus:
        yield f"GPUs      {', '.join(machine.gpus)}; driver {machine.driver or 'unknown'}"
    if device is not None:
        device_text = f" ({device.name}, {device.memory / 2**30:.0f} GiB)" if device.name else ""
        yield f"device    {device.device}{device_text}; CUDA of torch: {device.cuda or 'none'}"
        yield from _offer_lines("attention", device.attention)
        yield from _offer_lines("kernel", device.kernels)
        yield from _offer_lines("ranks", {"two ranks": device.communicators})
    yield from _plugins(report)
    yield from (f"report    {line}" for line in report.reports)
    yield from (f"problem   {line}" for line in report.problems)
    yield from (f"install   {line}" for line in report.advice)


def _offer_lines(
    label: str, reports_by_name: Mapping[str, Sequence[BackendReport]]
) -> Iterator[str]:
    for name, answers in reports_by_name.items():
        best = next((b for b in answers if b.score is not None), None)
        winner = f"{best.name} ({best.score})" if best else FALLBACK_NAMES.get(label, "-")
        yield f"{label:<10}{name}: {winner}"
        for report in answers:
            if report is not best:
                reason = (
                    "; ".join(report.reasons) if report.score is None else f"offers {report.score}"
                )
                yield f"          {report.name}: {reason}"


def _plugins(report: Report) -> Iterator[str]:
    flawed = [c for c in report.plugins if c.findings]
    imports = sorted({(c.seconds, c.target) for c in report.plugins if c.seconds is not None})
    total = sum(seconds for seconds, _ in imports)
    longest = f"; the longest is {imports[-1][1]} with {imports[-1][0]:.2f} s" if imports else ""
    yield f"plugins   {len(report.plugins)} keys, imports take {total:.2f} s{longest}"
    for checked in flawed:
        for finding in checked.findings:
            level = "error" if finding.fatal else "warning"
            owner = f"{checked.distribution} {checked.version}"
            yield f"{level:<10}{checked.id} from {owner}: {finding.code}: {finding.text}"


@impl
def treadle_command(name: str) -> typer.Typer | None:
    return single_command(name, doctor) if name == "doctor" else None
