"""Plugins of the generation before, through the adapter that another distribution's kind declares."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import contracts
import msgspec
import pytest

from treadle.api.stats import EngineStats
from treadle.config import PluginConfig
from treadle.errors import ConfigError, EngineError, PluginConflictError, PluginLoadError
from treadle.plugins import PluginManager, PluginSelection, installed_kinds
from treadle.testing.examination.checks import check
from treadle.testing.examination.listing import rows
from treadle_cli.templates import _template_variables

HOST = """
from treadle.api.hookspecs import impl, spec
from treadle.api.plugin_kind import PluginKind
from treadle.api.types import StatLogger
from treadle.errors import EngineError


class Specs:
    @spec(firstresult=True)
    def treadle_gauge(self, name, options):
        "Return a gauge."


class Adapted:
    def __init__(self, plugin):
        if getattr(plugin, "FAULT", "") == "adapter":
            raise KeyError("what the adapter needs")
        if getattr(plugin, "FAULT", "") == "exit":
            raise SystemExit(3)
        self.plugin = plugin

    @impl
    def treadle_gauge(self, name, options):
        "Generation 1 got the name and a path."
        return Gauge(self.plugin.treadle_old_gauge(name, options["path"]))


class Gauge:
    def __init__(self, old):
        self.old = old

    def record(self, stats):
        self.old.write(stats.num_steps)
        if stats.num_steps == 7:
            raise LookupError("in the adapter")


GAUGES = PluginKind(
    name="gauges", hook="treadle_gauge", builds=StatLogger, specs=Specs, failure="request", error=EngineError,
    generation=2, adapter=Adapted, adapter_until="3.0", owner="gauge-host",
)
"""
OLD = """
import msgspec
from treadle.api import impl

class Options(msgspec.Struct, frozen=True):
    path: str = "here"

TREADLE_OPTIONS = {"gauges:old": Options}
WRITTEN = []

class Old:
    def write(self, steps):
        WRITTEN.append(steps)
        if steps < 0:
            raise ValueError("in the plugin")

@impl
def treadle_old_gauge(name, path):
    WRITTEN.append((name, path))
    return Old()
"""
NEW = """
from treadle.api import impl

class New:
    def record(self, stats):
        pass

@impl
def treadle_gauge(name, options):
    return New()
"""
REASON = "speaks gauges v1, which gauge-host 3.0 will not call any more"


@pytest.fixture
def gauges(site: Any) -> Any:
    """A site with the kind ``gauges`` of generation 2, and a plugin of generation 1."""
    site.install("gauge-host", {"treadle.kinds": {"gauges": "gauge_host:GAUGES"}}, HOST)
    site.install("old-gauge", {"treadle.gauges": {"old": "old_gauge"}}, OLD)
    installed_kinds.cache_clear()
    yield site
    installed_kinds.cache_clear()


def build(plugins: PluginManager, key: str = "old") -> Any:
    return plugins.create_guarded(plugins.kind("gauges"), key)


def test_a_plugin_of_the_generation_before_works(
    gauges: Any, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"gauges:old": {"path": "there"}}
    plugins = gauges.plugin_manager(plugin_options=options)
    gauge = build(plugins)
    gauge.record(EngineStats(num_steps=3))
    build(plugins)
    import old_gauge  # type: ignore[import-not-found]

    assert old_gauge.WRITTEN == [("old", "there"), 3, ("old", "there")]
    lines = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
    assert lines == [f"gauges:old from old-gauge 1.0 {REASON}: see docs/project/migration.md"]
    assert plugins.call_stats.rows() == [
        ("gauges:old", "treadle_gauge", "ok", 2),
        ("gauges:old", "record", "ok", 1),
    ]


def test_its_faults_and_those_of_the_adapter_are_named(gauges: Any) -> None:
    gauge = build(gauges.plugin_manager())
    with pytest.raises(
        EngineError,
        match=r"gauges:old from old-gauge 1.0 failed in record: ValueError: in the plugin \(old_gauge.py, line 15\)",
    ):
        gauge.record(EngineStats(num_steps=-1))
    with pytest.raises(
        EngineError,
        match=r"gauges:old from old-gauge 1.0 failed in record: LookupError: 'in the adapter' \(through the adapter from v1\)|LookupError: in the adapter \(through",
    ):
        gauge.record(EngineStats(num_steps=7))
    with pytest.raises(ConfigError, match=r"gauges:old has no option 'pth'.*did you mean 'path'"):
        build(gauges.plugin_manager(plugin_options={"gauges:old": {"pth": "a"}}))


@pytest.mark.parametrize(
    ("fault", "words"), [("adapter", "KeyError: 'what the"), ("exit", "SystemExit: 3")]
)
def test_an_adapter_that_fails_costs_the_plugin(gauges: Any, fault: str, words: str) -> None:
    gauges.install(
        "bad-gauge", {"treadle.gauges": {"bad": "bad_gauge"}}, f"{OLD}\nFAULT = {fault!r}\n"
    )
    plugins = gauges.plugin_manager()
    with pytest.raises(
        PluginLoadError, match=r"gauges:bad from bad-gauge 1.0 failed to load"
    ) as error:
        build(plugins, "bad")
    assert f"the adapter of gauge-host from gauges v1 failed: {words}" in str(error.value)
    assert plugins.choose("gauges", "bad").state == "broken"
    build(plugins)


def test_lists_doctor_and_lock_know(gauges: Any, tmp_path: Path) -> None:
    plugins = gauges.plugin_manager()
    (row,) = rows(plugins, "gauges")
    assert (row.state, row.note) == ("ready", REASON)
    (report,), _ = check(plugins, plugins.entries, seconds=30)
    (finding,) = [f for f in report.findings if f.code != "slow"]
    assert (finding.code, finding.fatal) == ("adapted", False) and REASON in finding.text
    lock = tmp_path / "lock"
    lock.write_bytes(msgspec.json.encode(plugins.lock()))
    assert json.loads(lock.read_bytes())["plugins"][0]["generation"] == 1
    gauges.plugin_manager(plugin_lock_file=str(lock))
    moved = gauges.folder / "old_gauge-1.0.dist-info" / "entry_points.txt"
    moved.write_text(moved.read_text().replace("treadle.gauges", "treadle.gauges.v2"))
    with pytest.raises(PluginConflictError, match=r"\+ gauges:old \(v2\) from old-gauge 1.0"):
        gauges.plugin_manager(plugin_lock_file=str(lock))


def test_a_distribution_with_both_is_used_with_the_newer(gauges: Any) -> None:
    groups = {
        "treadle.gauges": {"both": "both_gauge_old"},
        "treadle.gauges.v2": {"both": "both_gauge"},
    }
    gauges.install("both-gauge", groups, NEW)
    plugins = gauges.plugin_manager()
    entry = plugins.choose("gauges", "both")
    assert (entry.generation, entry.adapted, entry.target) == (2, False, "both_gauge")
    build(plugins, "both").record(EngineStats())
    reports, _ = check(plugins, [e for e in plugins.entries if e.key == "both"], seconds=30)
    assert [f for report in reports for f in report.findings] == []
    gauges.install("older-gauge", {"treadle.gauges.v3": {"odd": "older_gauge"}}, NEW)
    odd = next(e for e in gauges.plugin_manager().entries if e.key == "odd")
    assert odd.reason == "speaks gauges v3, this treadle speaks v2 and v1"


def test_a_worker_adapts_what_its_parent_has_selected(gauges: Any) -> None:
    selection = gauges.plugin_manager().selection()
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(selection), type=PluginSelection)
    worker = PluginManager.from_selection(sent, PluginConfig(), gauges.scan)
    build(worker).record(EngineStats(num_steps=1))


def test_scaffold_and_migration_page(gauges: Any) -> None:
    assert _template_variables("gauges", "mine")["group"] == "treadle.gauges.v2"
    nothing: dict[str, Any] = {"hooks": {}, "types": {}}
    new = contracts.kind_contract(installed_kinds()["gauges"])
    old = {**nothing, "kinds": {"gauges": {**new, "generation": 1}}}
    (change,) = contracts.changes(old, {**nothing, "kinds": {"gauges": new}})
    assert (
        change.text
        == "`gauges` is generation 2, before 1. Plugins of generation 1 are called until gauge-host 3.0."
    )
