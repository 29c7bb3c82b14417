"""Installed metadata that are damaged, or claim what is another's: one plugin, and nobody else."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from treadle.errors import PluginLoadError
from treadle.known_plugins import may_import
from treadle.plugins import PluginManager, installed_kinds
from treadle.plugins.entries import scan
from treadle.processes.failure import is_for_process
from treadle.testing.examination.checks import check
from treadle.testing.examination.listing import rows

GOOD = "Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n"
POINTS = "[treadle.stat_loggers]\nmine = acme\n"


def install(folder: Path, metadata: bytes | None, points: bytes) -> None:
    info = folder / "acme-1.0.dist-info"
    info.mkdir()
    if metadata is not None:
        (info / "METADATA").write_bytes(metadata)
    (info / "entry_points.txt").write_bytes(points)


@pytest.mark.parametrize(
    ("metadata", "points", "words"),
    [
        (None, POINTS.encode(), "lack a Name or Version"),
        (b"Metadata-Version: 2.1\nName: acme\n", POINTS.encode(), "lack a Name or Version"),
        (b"Name: acme\xff\nVersion: 1.0\n", POINTS.encode(), ""),
        (GOOD.encode(), b"[treadle.stat_loggers]\nmine = acm\xe9\n", ""),
        (GOOD.encode(), POINTS.encode() + b"nonsense\n", ""),
    ],
)
def test_damaged_metadata_are_one_broken_plugin(
    metadata: bytes | None,
    points: bytes,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(tmp_path, metadata, points)
    monkeypatch.syspath_prepend(tmp_path)
    assert {"server", "commands"} <= installed_kinds.__wrapped__().keys()
    plugins = PluginManager()
    assert "fcfs" in plugins.keys("scheduling_policies")
    if "mine" in plugins.keys("stat_loggers"):
        with pytest.raises(PluginLoadError, match="stat_loggers:mine from acme"):
            plugins.load("stat_loggers", "mine")
        (row,) = (row for row in rows(plugins, "stat_loggers") if row.key == "mine")
        assert row.state == "broken" and words in row.note
    assert list(rows(plugins))


def test_a_missing_requirement_is_a_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, f"{GOOD}Requires-Dist: nowhere>=2\n".encode(), POINTS.encode())
    monkeypatch.syspath_prepend(tmp_path)
    plugins = PluginManager()
    (row,) = (row for row in rows(plugins, "stat_loggers") if row.key == "mine")
    words = "it needs nowhere, which is not installed; pip install 'nowhere>=2'"
    assert row.state == "unmet" and words in row.note
    (entry,) = (e for e in plugins.entries if e.id == "stat_loggers:mine")
    (report,), _ = check(plugins, [entry], seconds=60.0)
    assert (report.state, report.seconds) == ("unmet", None)  # not imported
    assert [(f.code, f.text) for f in report.findings] == [("dependency", words)]


def test_who_claims_a_key_of_treadles_does_not_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(tmp_path, GOOD.encode(), b"[treadle.scheduling_policies]\nfcfs = acme\n")
    monkeypatch.syspath_prepend(tmp_path)
    plugins = PluginManager()
    for _ in range(2):
        assert plugins.choose("scheduling_policies", "fcfs").dist == "treadle-core"
    (line,) = (record.getMessage() for record in caplog.records)
    assert "acme 1.0" in line and "--pin-plugin scheduling_policies:fcfs=DIST" in line
    (thief,) = (e for e in plugins.entries if e.dist == "acme")
    pin = "--pin-plugin scheduling_policies:fcfs=acme"
    (row,) = (row for row in rows(plugins, "scheduling_policies") if row.distribution == "acme")
    assert "conflict" in row.note and pin in row.note
    (report,), _ = check(plugins, [thief], seconds=60.0)
    assert [pin in finding.text for finding in report.findings if finding.code == "conflict"] == [
        True
    ]
    assert may_import("acme") and any(e.dist == "acme" for e in scan())


def test_an_exit_is_a_plugins_unless_a_signal_handler_asks_for_it() -> None:
    def leave(number: int, frame: object) -> None:
        raise SystemExit(0)

    def raised() -> BaseException:
        try:
            leave(0, None)
        except SystemExit as error:
            return error
        raise AssertionError

    assert not is_for_process(raised()) and is_for_process(KeyboardInterrupt())
    before = signal.signal(signal.SIGTERM, leave)
    try:
        assert is_for_process(raised())
    finally:
        signal.signal(signal.SIGTERM, before)
