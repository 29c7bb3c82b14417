"""Plugins that raise while the engine runs: who pays for it, and that the engine goes on."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from treadle.api.kinds import SCHEDULING_POLICIES
from treadle.errors import EngineError
from treadle.plugins.guard import MAX_CONSECUTIVE_FAILURES

PROMPT = [5, 9, 200, 17, 33, 4, 90, 12]

EXTENSION = """
from treadle.api import impl


@impl(wrapper=True)
def treadle_scheduling_policy(name):
    found = yield
    raise TypeError("the extension is wrong")
"""


@pytest.fixture
def plugin(tmp_path: Any) -> Any:
    def write(text: str, name: str = "odd") -> list[str]:
        (tmp_path / f"{name}.py").write_text(text)
        return [str(tmp_path / f"{name}.py")]

    return write


def calls(driven: Any, plugin: str, hook: str) -> dict[str, int]:
    """By outcome; a slow call is ok, because other tests may keep the machine busy."""
    counts: Counter[str] = Counter()
    for p, h, outcome, n in driven.core.stats.plugin_calls:
        if (p, h) == (plugin, hook):
            counts["ok" if outcome == "slow" else outcome] += n
    return dict(counts)


def test_an_extension_that_raises_is_left_out(engine: Any, checkpoint: Any, plugin: Any) -> None:
    driven = engine(checkpoint(), plugin_file=plugin(EXTENSION))
    driven.add("a", PROMPT, max_tokens=4, ignore_eos=True)
    driven.run()
    assert driven.reasons == {"a": "length"}
    assert calls(driven, "extensions:odd", "treadle_scheduling_policy") == {"error": 1}
    for _ in range(MAX_CONSECUTIVE_FAILURES):
        assert driven.core.plugins.create(SCHEDULING_POLICIES, "fcfs") is not None
    assert calls(driven, "extensions:odd", "treadle_scheduling_policy") == {
        "error": MAX_CONSECUTIVE_FAILURES
    }
    assert driven.core.stats.plugin_states["extensions:odd"] == "broken"


def test_in_strict_mode_an_extension_that_raises_ends_the_start(
    engine: Any, checkpoint: Any, plugin: Any
) -> None:
    with pytest.raises(EngineError, match=r"extensions:odd .*the extension is wrong"):
        engine(checkpoint(), plugin_file=plugin(EXTENSION), plugin_strict=True)


def test_an_error_of_the_plugin_is_not_put_on_the_extension(
    engine: Any, checkpoint: Any, plugin: Any, tmp_path: Any
) -> None:
    from treadle.config import PluginConfig
    from treadle.errors import PluginLoadError
    from treadle.plugins import PluginManager

    files = plugin(EXTENSION.replace('raise TypeError("the extension is wrong")', "return found"))
    bad = 'from treadle.api import impl\nTREADLE = {"scheduling_policies": ["bad"]}\n@impl\ndef treadle_scheduling_policy(name):\n    1 / 0\n'
    files += plugin(bad, "bad")
    plugins = PluginManager(PluginConfig(plugin_file=files))
    with pytest.raises(PluginLoadError, match=r"scheduling_policies:bad .*division by zero"):
        plugins.create(SCHEDULING_POLICIES, "bad")
    assert (
        "scheduling_policies:bad",
        "treadle_scheduling_policy",
        "error",
        1,
    ) in plugins.call_stats.rows()
