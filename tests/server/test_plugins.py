"""Plugins seen from outside: ``GET /plugins`` and their metrics."""

from __future__ import annotations

from serving import serving

from treadle.api.kinds import SCHEDULING_POLICIES, STAT_LOGGERS
from treadle.api.stats import EngineStats
from treadle.plugins.call_stats import PluginCallStats
from treadle_server.metrics import Metrics


async def test_plugins_are_listed_with_their_states() -> None:
    async with serving(api_key=["k"]) as server:
        assert (await server.client.get("/plugins")).status_code == 401
        answer = await server.client.get("/plugins", headers={"authorization": "Bearer k"})
    rows = {f"{row['kind']}:{row['key']}": row for row in answer.json()["data"]}
    assert rows["scheduling_policies:fcfs"]["distribution"] == "treadle-core"
    assert rows["server:plugins"]["state"] == "loaded"
    assert all("target" not in row for row in rows.values()), "paths of the machine"


def test_states_of_the_engine_are_shown() -> None:
    from treadle.testing.examination.listing import Row
    from treadle_server.routes.plugins import describe

    row = Row("stat_loggers", "x", "treadle-x", "1.0", "ready", "", "treadle_x")
    assert describe(row, {"stat_loggers:x": "broken"})["state"] == "broken"
    assert describe(row, {})["state"] == "ready"


def test_calls_and_states_are_metrics() -> None:
    stats = EngineStats(
        plugin_calls=[
            ("stat_loggers:x", "record", "error", 3),
            ("scheduling_policies:fcfs", "order", "ok", 7),
        ],
        plugin_seconds=[("scheduling_policies:fcfs", "order", 7, 0.5)],
        plugin_states={"stat_loggers:x": "broken"},
    )
    call_stats = PluginCallStats()
    call_stats.counter(STAT_LOGGERS, "stat_loggers:x", "record").record_failure()
    call_stats.counter(SCHEDULING_POLICIES, "scheduling_policies:fcfs", "order").record_success(1.5)
    page = Metrics("m", call_stats).exposition(stats)[0].decode()
    labels = 'hook="record",model_name="m",outcome="error",plugin="stat_loggers:x"'
    assert f"treadle_plugin_calls_total{{{labels}}} 4.0" in page, "of both processes"
    labels = 'hook="order",model_name="m",outcome="slow",plugin="scheduling_policies:fcfs"'
    assert f"treadle_plugin_calls_total{{{labels}}} 1.0" in page
    labels = 'hook="order",model_name="m",plugin="scheduling_policies:fcfs"'
    assert f"treadle_plugin_seconds_count{{{labels}}} 8.0" in page
    assert f"treadle_plugin_seconds_sum{{{labels}}} 2.0" in page
    assert 'treadle_plugin_state{model_name="m",plugin="stat_loggers:x",state="broken"} 1.0' in page
