"""An executor that fails is the end of its engine, which says so, and lets go of everything."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from engines import calls, config, finish, hosted, named, start

from treadle import LLM
from treadle.errors import EngineDeadError, PluginLoadError
from treadle.testing.introspection import report

fault = pytest.mark.fault
Odd = Callable[..., LLM]

HELD = {"logits_processors": ["odd"]}
EVEN = {"extra": {"odd": "even"}}


@pytest.mark.parametrize("how", ["RuntimeError", "Panic"])
@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize(
    "method",
    [
        pytest.param("launch", marks=fault("executors", "launch")),
        pytest.param("sample", marks=fault("executors", "sample")),
        pytest.param("collect", marks=fault("executors", "collect")),
    ],
)
def test_an_executor_that_raises_ends_the_engine(odd: Odd, method: str, at: int, how: str) -> None:
    """Unlike a step that it reports as failed: nobody knows what became of this one."""
    llm = odd("executors", method, how, at=at, **HELD)
    with pytest.raises(EngineDeadError, match=named("executors", method, f"{how}: odd")) as caught:
        finish(llm, EVEN, EVEN)
    assert type(caught.value.__cause__).__name__ == how
    assert calls(llm, "executors", method)["error"] == 1
    with pytest.raises(EngineDeadError, match=rf"the engine has failed .*failed in {method}"):
        finish(llm, {})
    llm.shutdown()
    assert calls(llm, "executors", "stop") == {"ok": 1}


@pytest.mark.parametrize("method", ["launch", "sample", "collect"])
def test_what_it_says_itself_passes(odd: Odd, method: str) -> None:
    llm = odd("executors", method, "EngineDeadError", at=2, **HELD)
    with pytest.raises(EngineDeadError, match=r"^odd$"):
        finish(llm, EVEN)


@fault("executors", "collect")
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("None", "executors:odd .*failed in collect: TypeError: it returned None; StepResult"),
        ("text", "executors:odd .*failed in collect: TypeError: it returned 'odd'; StepResult"),
        ("other step", "the executor returned step 2; expected step 1"),
        ("no tokens", "the executor returned 0 tokens for step 1; expected 2"),
    ],
)
def test_results_that_are_none_end_the_engine(odd: Odd, how: str, words: str) -> None:
    llm = odd("executors", "collect", how, at=2)
    with pytest.raises(EngineDeadError, match=words):
        finish(llm, {}, {})
    with pytest.raises(EngineDeadError, match="the engine has failed"):
        finish(llm, {})


@fault("executors", "check")
@pytest.mark.parametrize("how", ["RuntimeError", "Panic", "EngineDeadError"])
def test_an_idle_engine_notices_a_lost_executor(odd: Odd, expected: list[int], how: str) -> None:
    llm = odd("executors", "check", how, at=2)
    llm._core.check_health()
    assert finish(llm, {})[0].token_ids == expected
    words = "^odd$" if how == "EngineDeadError" else named("executors", "check", f"{how}: odd")
    with pytest.raises(EngineDeadError, match=words):
        llm._core.check_health()
    assert calls(llm, "executors", "check") == {"ok": 1, "error": 1}


@fault("executors", "stop")
@pytest.mark.parametrize("how", ["RuntimeError", "Panic", "EngineDeadError"])
def test_an_executor_that_does_not_stop_is_logged(
    odd: Odd, expected: list[int], how: str, caplog: pytest.LogCaptureFixture
) -> None:
    llm = odd("executors", "stop", how)
    assert finish(llm, {})[0].token_ids == expected
    with caplog.at_level(logging.ERROR):
        llm.shutdown()
    assert "odd" in caplog.text and calls(llm, "executors", "stop") == {"error": 1}
    llm.shutdown()
    assert calls(llm, "executors", "stop") == {"error": 1}, "it is stopped once"


@fault("executors", "start", "stop")
def test_a_failed_start_is_stopped_and_the_cause_is_kept() -> None:
    made = config("executors", "start")
    host = hosted(made)
    with pytest.raises(PluginLoadError, match=named("executors", "start")):
        start(host, made)
    assert calls(host, "executors", "stop") == {"ok": 1}


EXTENSION = """
from treadle.api import impl

log = []


@impl
def treadle_configure(config):
    log.append("configured")


@impl
def treadle_unconfigure():
    log.append("released")


@impl
def treadle_report():
    return " ".join(log)
"""


@fault("executors", "hook", "start")
@pytest.mark.parametrize("method", ["hook", "start"])
def test_a_failed_start_releases_the_extensions(tmp_path: Path, method: str) -> None:
    file = tmp_path / "seen.py"
    file.write_text(EXTENSION + f"\n# {method}\n")
    made = config("executors", method)
    made.plugins.plugin_file.append(str(file))
    host = hosted(made)
    with pytest.raises(PluginLoadError):
        start(host, made)
    assert any("configured released" in line for line in report(host))
