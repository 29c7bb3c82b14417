"""Calls that take longer than their kind allows are counted, and said once."""

from __future__ import annotations

import logging
from time import perf_counter

import pytest

from treadle.api.kinds import EXECUTORS, MODELS, QUANTIZATION, SCHEDULING_POLICIES, STAT_LOGGERS
from treadle.api.plugin_kind import HOOK_SECONDS, LOADING_SECONDS
from treadle.config import PluginConfig, from_options
from treadle.errors import ConfigError
from treadle.plugins import PluginManager
from treadle.plugins.call_stats import PluginCallStats


def test_a_call_is_ok_slow_or_an_error():
    tally = PluginCallStats({"scheduling_policies": 1.0})
    for ago in (0.0, 0.5, 1.5, 3.0):
        tally.counter(SCHEDULING_POLICIES, "scheduling_policies:x", "sort_key").record_success(ago)
    counter = tally.counter(SCHEDULING_POLICIES, "scheduling_policies:x", "sort_key")
    counter.record_failure(perf_counter() - 5)
    rows = {outcome: count for _, _, outcome, count in tally.rows()}
    assert rows == {"ok": 2, "slow": 2, "error": 1}
    ((_, hook, count, seconds),) = tally.seconds()
    assert (hook, count) == ("sort_key", 5) and seconds == pytest.approx(10, abs=0.5)


def test_a_slow_plugin_is_said_once_in_a_while(caplog):
    tally = PluginCallStats({"scheduling_policies": 1.0})
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            tally.counter(SCHEDULING_POLICIES, "scheduling_policies:x", "sort_key").record_success(
                2
            )
            tally.counter(SCHEDULING_POLICIES, "scheduling_policies:y", "sort_key").record_success(
                0.1
            )
        tally.counter(SCHEDULING_POLICIES, "scheduling_policies:z", "sort_key").record_success(3)
    messages = [record.getMessage() for record in caplog.records]
    assert [text.partition(" is slow")[0] for text in messages] == [
        "scheduling_policies:x",
        "scheduling_policies:z",
    ]
    assert "took 2 s, its budget is 1 s (--plugin-time-budget)" in messages[0]


def test_hooks_have_more_time_than_methods():
    tally = PluginCallStats({"scheduling_policies": 0.5, "models": 60.0})
    assert tally.budget(SCHEDULING_POLICIES, "sort_key") == 0.5
    assert tally.budget(SCHEDULING_POLICIES, "treadle_scheduling_policy") == HOOK_SECONDS
    assert tally.budget(MODELS, "treadle_model") == 60.0
    assert (
        tally.budget(EXECUTORS, "start")
        == LOADING_SECONDS
        > tally.budget(EXECUTORS, "execute_model")
    )
    assert tally.budget(STAT_LOGGERS, "record") == STAT_LOGGERS.budget


def test_a_budget_of_a_kind_that_is_none_is_refused():
    with pytest.raises(ConfigError, match=r"time_budget: there is no kind 'policy'; known.*models"):
        PluginManager(PluginConfig(plugin_time_budget={"policy": 1.0}))
    with pytest.raises(ConfigError, match="plugin_time_budget"):
        from_options(model="m", plugin_time_budget={"scheduling_policies": 0})


def test_a_slow_hook_is_counted(site):
    site.scheme("acme-awq", "awq")
    plugins = site.plugin_manager()
    plugins.call_stats = PluginCallStats({"quantization": 1.0})
    plugins.create(QUANTIZATION, "awq", checkpoint={}, device=None)
    assert ("quantization:awq", "treadle_quantization", "ok", 1) in plugins.call_stats.rows()
    assert any(
        row[:3] == ("quantization:awq", "treadle_quantization", 1)
        for row in plugins.call_stats.seconds()
    )
