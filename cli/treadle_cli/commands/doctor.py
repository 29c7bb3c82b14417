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
from treadle_cli.help import single

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
    """Load every plugin in a process of its own, ask all backends for this device, and report.

    The exit code is 0 if nothing is wrong, else 1.
    """
    from treadle_cli.doctor.report import examine

    found = examine(PluginManager(options.struct(PLUGINS)), seconds=timeout)
    failed = found.failed(strict)
    if json:
        print(msgspec.json.encode({"ok": not failed, **msgspec.structs.asdict(found)}).decode())
    else:
        for line in _shown(found):
            sys.stdout.write(f"{line}\n")
    if failed:
        raise typer.Exit(1)


OWN = {"kernel": "treadle's own", "ranks": "torch.distributed"}
"""What serves without an offer."""


def _shown(found: Report) -> Iterator[str]:
    machine, seen = found.machine, found.device
    yield f"python    {machine.python} on {machine.platform}"
    yield f"versions  {', '.join(f'{n} {v}' for n, v in machine.versions.items())}"
    if machine.gpus:
        yield f"GPUs      {', '.join(machine.gpus)}; driver {machine.driver or 'unknown'}"
    if seen is not None:
        named = f" ({seen.name}, {seen.memory / 2**30:.0f} GiB)" if seen.name else ""
        yield f"device    {seen.device}{named}; CUDA of torch: {seen.cuda or 'none'}"
        yield from _bids("attention", seen.attention)
        yield from _bids("kernel", seen.kernels)
        yield from _bids("ranks", {"two ranks": seen.communicators})
    yield from _plugins(found)
    yield from (f"report    {line}" for line in found.reports)
    yield from (f"problem   {line}" for line in found.problems)
    yield from (f"install   {line}" for line in found.advice)


def _bids(what: str, bids: Mapping[str, Sequence[BackendReport]]) -> Iterator[str]:
    for name, answers in bids.items():
        best = next((b for b in answers if b.score is not None), None)
        winner = f"{best.name} ({best.score})" if best else OWN.get(what, "-")
        yield f"{what:<10}{name}: {winner}"
        for bid in answers:
            if bid is not best:
                why = "; ".join(bid.reasons) if bid.score is None else f"offers {bid.score}"
                yield f"          {bid.name}: {why}"


def _plugins(found: Report) -> Iterator[str]:
    bad = [c for c in found.plugins if c.findings]
    tried = sorted({(c.seconds, c.target) for c in found.plugins if c.seconds is not None})
    total = sum(seconds for seconds, _ in tried)
    longest = f"; the longest is {tried[-1][1]} with {tried[-1][0]:.2f} s" if tried else ""
    yield f"plugins   {len(found.plugins)} keys, imports take {total:.2f} s{longest}"
    for checked in bad:
        for finding in checked.findings:
            level = "error" if finding.fatal else "warning"
            owner = f"{checked.distribution} {checked.version}"
            yield f"{level:<10}{checked.id} from {owner}: {finding.code}: {finding.text}"


@impl
def treadle_command(name: str) -> typer.Typer | None:
    return single(name, doctor) if name == "doctor" else None
