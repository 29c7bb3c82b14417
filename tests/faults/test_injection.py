"""Every hook and every method of every kind, made to go wrong in every way that a process survives.

The plugin is named, with the method and the cause, and the failure costs what the kind says. The other
tests of this folder show the same of whole engines and servers, for faults of which each has its own words.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import runpy
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass
from inspect import signature
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import pytest

from treadle.api import types
from treadle.api.contracts import FUNCTION, Member, members
from treadle.api.plugin_kind import MethodRules, PluginKind
from treadle.api.result_checks import BY_ANNOTATION, any_result
from treadle.config import PluginConfig
from treadle.errors import EngineError, PluginLoadError, TreadleError
from treadle.plugins import PluginManager, installed_kinds
from treadle.plugins.boundary import wrap
from treadle.plugins.call_stats import PluginCallStats
from treadle.plugins.entries import Entry
from treadle.plugins.guard import MAX_CONSECUTIVE_FAILURES, PluginGuard
from treadle.processes import logs
from treadle.processes.isolated import ignore_interrupts
from treadle.processes.watchdog import MAX_STUCK_THREADS, PluginThreads
from treadle.text.text_pool import MAX_SLOW_JOBS, TextPool
from treadle_server import load_monitor
from treadle_server.load_monitor import LoadMonitor, last_step


class Panic(BaseException):
    """Like a panic of a Rust library, which is no Exception."""


def leave_thread() -> None:
    """Fail, and leave a thread behind that is no daemon."""
    started, released = threading.Event(), LEFT
    threading.Thread(target=lambda: (started.set(), released.wait())).start()
    started.wait()
    raise RuntimeError("odd")


def fail(error: type[BaseException]) -> Callable[[], None]:
    def call() -> None:
        raise error("odd")

    return call


LEFT = threading.Event()
FAULTS: dict[str, tuple[Callable[[], None], str]] = {
    "raise": (fail(RuntimeError), "RuntimeError: odd"),
    "panic": (fail(Panic), "Panic: odd"),
    "sys.exit": (lambda: sys.exit("odd"), "SystemExit: odd"),
    "thread": (leave_thread, "RuntimeError: odd"),
}


class Site(NamedTuple):
    """A method of a protocol, or a function in data, at which plugins of a kind are called."""

    kind: PluginKind[Any]
    contract: type
    member: Member

    def __str__(self) -> str:
        return f"{self.kind.name}-{self.contract.__name__}.{self.member.name}"

    @property
    def rules(self) -> MethodRules:
        return self.kind.methods.get(self.member.key, MethodRules())

    @property
    def is_checked(self) -> bool:
        """Whether there are results that the boundary refuses."""
        if self.rules.result is not None:
            return self.rules.result is not any_result
        name = self.member.returns.removesuffix(" | None")
        has_contract = isinstance(getattr(types, name, None), type)
        return name in BY_ANNOTATION or has_contract or bool(FUNCTION.fullmatch(name))

    def call(self, guard: PluginGuard, work: Callable[[], Any]) -> Any:
        """Call it on an object of a plugin that does ``work`` there."""
        name = self.member.name
        if is_dataclass(self.contract):
            values: dict[str, Any] = {f.name: None for f in fields(self.contract)}
            built: Any = self.contract(**values | {name: lambda *_: work()})
        else:
            made: dict[str, Any] = {m.name: lambda *_: None for m in members(self.contract)}
            made[name] = (
                property(lambda _: work()) if self.member.is_property else lambda *_: work()
            )
            built = type("Built", (), made)()
        guarded = wrap(built, guard, contract=self.contract.__name__)
        if self.member.is_property:
            return getattr(guarded, name)
        return getattr(guarded, name)(*arguments(self.rules))


def arguments(rules: MethodRules) -> list[Any]:
    """What the check of a method needs beside the result."""
    check = rules.result() if isinstance(rules.result, type) else rules.result
    count = len(signature(check).parameters) if check is not None else 0
    queued = MagicMock(arrival_time=0.0, shape=(2, 3))
    return [[queued]] if rules.fallback is not None else [queued] * count


def contracts(kind: PluginKind[Any]) -> Iterator[type]:
    """The protocols and data that a kind builds, and what these return in turn."""
    found = [kind.builds, *kind.optional] if kind.builds is not None else []
    for contract in found:
        yield contract
        for member in members(contract):
            result = getattr(types, member.returns.removesuffix(" | None"), None)
            if isinstance(result, type) and members(result) and result not in found:
                found.append(result)


KINDS = tuple(installed_kinds().values())
SITES = [
    Site(kind, contract, member)
    for kind in KINDS
    for contract in contracts(kind)
    for member in members(contract)
]


def guard_of(kind: PluginKind[Any], *, strict: bool = False) -> PluginGuard:
    entry = Entry(kind.name, "x", "x", "stranger", "1", state="loaded")
    return PluginGuard(entry, kind, PluginCallStats(), is_strict=strict)


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    LEFT.clear()
    yield
    LEFT.set()


# ------------------------------------------------------------------------------ methods


@pytest.mark.fault(
    "structured_output", "accept_tokens", "fill_bitmasks", "forced_tokens", "unenforced"
)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("site", SITES, ids=str)
def test_a_method_that_fails_is_named_and_costs_what_its_kind_says(
    site: Site, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    work, cause = FAULTS[fault]
    guard, rules = guard_of(site.kind), site.rules
    words = f"{site.kind.name}:x from stranger 1 failed in {site.member.name}: {cause}"
    if site.kind.failure == "itself" or rules.fallback is not None:
        site.call(guard, work)
        assert words in caplog.text
    else:
        with pytest.raises(rules.error or site.kind.error) as caught:
            site.call(guard, work)
        assert words in str(caught.value)
    assert {outcome: count for *_, outcome, count in guard._stats.rows()} == {"error": 1}
    if site.kind.failure != "engine":
        error = rules.error or EngineError
        with pytest.raises(error, match="plugin_strict" if error is EngineError else "failed in"):
            site.call(guard_of(site.kind, strict=True), work)


@pytest.mark.parametrize("site", [s for s in SITES if s.is_checked], ids=str)
def test_a_wrong_result_is_a_failure_of_who_returned_it(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    """At least one of these is wrong for each, and nothing that is refused gets through."""
    refused = 0
    for wrong in (object(), None, False, lambda *_: None):
        guard = guard_of(site.kind)
        with suppress(TreadleError):
            site.call(guard, lambda wrong=wrong: wrong)
        refused += any(outcome == "error" for *_, outcome, _ in guard._stats.rows())
    assert refused


@pytest.mark.parametrize("site", [s for s in SITES if s.kind.failure == "itself"], ids=str)
def test_a_breaker_opens_lets_one_trial_through_and_closes(site: Site) -> None:
    guard, calls = guard_of(site.kind), []

    def work() -> None:
        calls.append(1)
        raise RuntimeError("odd")

    for _ in range(2 * MAX_CONSECUTIVE_FAILURES):
        site.call(guard, work)
    assert len(calls) == MAX_CONSECUTIVE_FAILURES and guard.entry.state == "broken"
    guard.retry_time = perf_counter()
    for _ in range(2):
        site.call(guard, work)
    assert len(calls) == MAX_CONSECUTIVE_FAILURES + 1 and guard.retry_time > perf_counter()
    guard.retry_time = perf_counter()
    site.call(guard, lambda: None)
    assert guard.entry.state == "loaded" and not guard.strikes


# The kinds whose methods are called in threads that are given up.
PARSERS = [s for s in SITES if s.kind.name in ("tool_parsers", "reasoning_parsers")]
TEXTS = [s for s in SITES if s.kind.name in ("tokenizers", "renderers")]


@pytest.mark.parametrize("site", PARSERS, ids=str)
async def test_a_method_of_a_parser_that_hangs_keeps_nobody_else(site: Site) -> None:
    threads, guard = PluginThreads(0.001), guard_of(site.kind)
    executor = threads[guard.entry.id]
    calls = [executor.submit(lambda: site.call(guard, LEFT.wait)) for _ in range(MAX_STUCK_THREADS)]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [TimeoutError] * MAX_STUCK_THREADS
    assert executor.is_broken
    with pytest.raises(TimeoutError, match="4 threads are stuck in it"):
        await executor.submit(lambda: None)
    threads.budget = 60.0
    assert await threads["another"].submit(lambda: "served") == "served"
    threads.close()


@pytest.mark.parametrize("site", TEXTS, ids=str)
async def test_a_method_for_texts_that_hangs_is_named_and_keeps_nobody_else(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, guard, name = TextPool(0.001, 64), guard_of(site.kind), site.member.name
    words = f"{site.kind.name}:x from stranger 1 failed in {name}: TimeoutError: "
    calls = [
        pool.run(lambda: site.call(guard, LEFT.wait), 1, guard=guard, method=name)
        for _ in range(MAX_SLOW_JOBS)
    ]
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(outcome, site.kind.error) and words in str(outcome)
    with pytest.raises(site.kind.error, match="8 threads are stuck in it"):
        await pool.run(lambda: None, 1, guard=guard, method=name)
    monkeypatch.setattr(pool, "_budget", 60.0)
    assert await pool.run(lambda: "served", 1, guard=guard_of(site.kind)) == "served"
    pool.close()


@pytest.mark.parametrize("site", SITES, ids=str)
def test_a_method_that_crashes_its_process_is_named_by_its_line(site: Site, tmp_path: Path) -> None:
    """What a crash costs is the process; what a server starts tells where in the plugin it was."""
    log = tmp_path / "log"
    file = tmp_path / "stranger.py"
    file.write_text("import os, signal\n\ndef work():\n    os.kill(os.getpid(), signal.SIGSEGV)\n")
    work = runpy.run_path(str(file))["work"]
    child = os.fork()
    if not child:
        ignore_interrupts()  # and leave no core file
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
        LoadMonitor(tmp_path).start()
        site.call(guard_of(site.kind), work)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV
    assert f'File "{file}", line 4 in work' in log.read_text()


# -------------------------------------------------------------------------------- hooks

PLUGIN = """
from treadle.api import impl

TREADLE = {{"{kind}": ["x"]}}
works = []

@impl
def {hook}():
    return works[0]()
"""


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def call_hook(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Any]:
    """``call_hook(work)``: calls the hook of a kind in a plugin that does ``work`` in it."""
    kind = request.param
    file = tmp_path / f"odd_{kind.name}.py"
    file.write_text(PLUGIN.format(kind=kind.name, hook=kind.hook))
    plugins = PluginManager(PluginConfig(plugin_file=[str(file)]))
    entry = plugins.choose(kind.name, "x")
    names = list(signature(getattr(kind.specs, kind.hook)).parameters)[1:]

    def call(work: Callable[[], Any]) -> Any:
        plugin: Any = plugins.loader.load(entry)
        plugin.works[:] = [work]
        return plugins.hooks(entry).call(kind.hook, dict.fromkeys(names))

    call.words = f"{kind.hook} of {entry.id} from {entry.owner}"  # type: ignore[attr-defined]
    call.failure = f"{entry.id} from {entry.owner} failed in {kind.hook}"  # type: ignore[attr-defined]
    return call


@pytest.mark.parametrize("fault", FAULTS)
def test_a_hook_that_fails_is_named(call_hook: Any, fault: str) -> None:
    work, cause = FAULTS[fault]
    with pytest.raises(PluginLoadError) as caught:
        call_hook(work)
    assert f"{call_hook.failure}: {cause}" in str(caught.value)


def test_a_hook_that_hangs_is_named_while_it_hangs(
    call_hook: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The notice lets it go on, so that without one this test would not end."""
    noticed, notices = threading.Event(), []

    class Notice(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "takes more than" in record.getMessage():
                notices.append(record.getMessage())
                noticed.set()

    monkeypatch.setattr(LoadMonitor, "seconds", 0.0)
    handler, monitor = Notice(), LoadMonitor(tmp_path)
    monkeypatch.setattr(load_monitor.log, "handlers", [handler])
    logs.steps.addHandler(monitor)
    try:
        call_hook(lambda: noticed.wait(60) or pytest.fail("nobody noticed"))
    finally:
        monitor.close()
    assert f"calling {call_hook.words} takes more than 0 s" in notices


def test_a_hook_that_crashes_its_process_is_named_by_the_parent(
    call_hook: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "steps"
    folder.mkdir()
    child = os.fork()
    if not child:
        faulthandler.disable()
        ignore_interrupts()  # and leave no core file
        logs.steps.addHandler(LoadMonitor(folder))
        call_hook(lambda: os.kill(os.getpid(), signal.SIGSEGV))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV
    assert last_step(folder) == f"calling {call_hook.words}"
