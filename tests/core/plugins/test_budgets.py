"""Calls that take longer than their kind allows are counted, and said once."""

from __future__ import annotations

import logging

import pytest

from treadle.api.kinds import QUANTIZATION
from treadle.api.plugin_kind import HOOK_SECONDS, LOADING_SECONDS
from treadle.config import PluginConfig, from_options
from treadle.errors import ConfigError
from treadle.plugins import PluginManager
from treadle.plugins.call_stats import PluginCallStats
from treadle.plugins.kinds import installed_kinds


def test_a_call_is_ok_slow_or_an_error():
    tally = PluginCallStats({"scheduling_policies": 1.0})
    for ago in (0.0, 0.5, 1.5, 3.0):
        tally.counter("scheduling_policies:x", "sort_key").done(ago)
    tally.counter("scheduling_policies:x", "sort_key").failed(5)
    rows = {outcome: count for _, _, outcome, count in tally.rows()}
    assert rows == {"ok": 2, "slow": 2, "error": 1}
    ((_, hook, count, seconds),) = tally.seconds()
    assert (hook, count) == ("sort_key", 5) and seconds == pytest.approx(10, abs=0.5)


def test_a_slow_plugin_is_said_once_in_a_while(caplog):
    tally = PluginCallStats({"scheduling_policies": 1.0})
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            tally.counter("scheduling_policies:x", "sort_key").done(2)
            tally.counter("scheduling_policies:y", "sort_key").done(0.1)
        tally.counter("scheduling_policies:z", "sort_key").done(3)
    said = [record.getMessage() for record in caplog.records]
    assert [text.partition(" is slow")[0] for text in said] == [
        "scheduling_policies:x",
        "scheduling_policies:z",
    ]
    assert "took 2 s, its budget is 1 s (--plugin-time-budget)" in said[0]


def test_hooks_have_more_time_than_methods():
    tally = PluginCallStats({"scheduling_policies": 0.5, "models": 60.0})
    assert tally.budget("scheduling_policies:x", "sort_key") == 0.5
    assert tally.budget("scheduling_policies:x", "treadle_scheduling_policy") == HOOK_SECONDS
    assert tally.budget("models:x", "treadle_model") == 60.0
    assert (
        tally.budget("executors:x", "start")
        == LOADING_SECONDS
        > tally.budget("executors:x", "execute_model")
    )
    assert tally.budget("stat_loggers:x", "record") == installed_kinds()["stat_loggers"].budget


def test_a_budget_of_a_kind_that_is_none_is_refused():
    with pytest.raises(
        ConfigError, match=r"plugin_time_budget names 'policy'.*scheduling_policies"
    ):
        PluginManager(PluginConfig(plugin_time_budget={"policy": 1.0}))
    with pytest.raises(ConfigError, match="plugin_time_budget"):
        from_options(model="m", plugin_time_budget={"scheduling_policies": 0})


def test_a_slow_hook_is_counted(site):
    site.scheme("acme-awq", "awq")
    host = site.host()
    host.call_stats = PluginCallStats({"quantization": 1.0})
    host.create(QUANTIZATION, "awq", checkpoint={}, device=None)
    assert ("quantization:awq", "treadle_quantization", "ok", 1) in host.call_stats.rows()
    assert any(
        row[:3] == ("quantization:awq", "treadle_quantization", 1)
        for row in host.call_stats.seconds()
    )
