"""An executor that fails is the end of its engine, which says so, and lets go of everything."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from engines import calls, config, create_plugins, failure_pattern, finish, start

from treadle import LLM
from treadle.errors import EngineDeadError, PluginLoadError
from treadle.testing.introspection import report

fault = pytest.mark.fault
Odd = Callable[..., LLM]

HELD = {"logits_processors": ["odd"]}
EVEN = {"extra_args": {"odd": "even"}}


@pytest.mark.parametrize("failure", ["RuntimeError", "Panic"])
@pytest.mark.parametrize("first_call", [1, 3])
@pytest.mark.parametrize(
    "method",
    [
        pytest.param("execute_model", marks=fault("executors", "execute_model")),
        pytest.param("sample_tokens", marks=fault("executors", "sample_tokens")),
        pytest.param("get_output", marks=fault("executors", "get_output")),
    ],
)
def test_an_executor_that_raises_ends_the_engine(
    odd: Odd, method: str, first_call: int, failure: str
) -> None:
    """Unlike a step that it reports as failed: nobody knows what became of this one."""
    llm = odd("executors", method, failure, first_call=first_call, **HELD)
    with pytest.raises(
        EngineDeadError, match=failure_pattern("executors", method, f"{failure}: odd")
    ) as exc_info:
        finish(llm, EVEN, EVEN)
    assert type(exc_info.value.__cause__).__name__ == failure
    assert calls(llm, "executors", method)["error"] == 1
    with pytest.raises(EngineDeadError, match=rf"the engine has failed .*failed in {method}"):
        finish(llm, {})
    llm.shutdown()
    assert calls(llm, "executors", "shutdown") == {"ok": 1}


@pytest.mark.parametrize("method", ["execute_model", "sample_tokens", "get_output"])
def test_what_it_says_itself_passes(odd: Odd, method: str) -> None:
    llm = odd("executors", method, "EngineDeadError", first_call=2, **HELD)
    with pytest.raises(EngineDeadError, match=r"^odd$"):
        finish(llm, EVEN)


@fault("executors", "get_output")
@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (
            "None",
            "executors:odd .*failed in get_output: TypeError: it returned None; ModelRunnerOutput",
        ),
        (
            "text",
            "executors:odd .*failed in get_output: TypeError: it returned 'odd'; ModelRunnerOutput",
        ),
        ("other step", "the executor returned step 2; expected step 1"),
        ("no tokens", "the executor returned 0 tokens for step 1; expected 2"),
    ],
)
def test_results_that_are_none_end_the_engine(odd: Odd, failure: str, words: str) -> None:
    llm = odd("executors", "get_output", failure, first_call=2)
    with pytest.raises(EngineDeadError, match=words):
        finish(llm, {}, {})
    with pytest.raises(EngineDeadError, match="the engine has failed"):
        finish(llm, {})


@fault("executors", "check_health")
@pytest.mark.parametrize("failure", ["RuntimeError", "Panic", "EngineDeadError"])
def test_an_idle_engine_notices_a_lost_executor(
    odd: Odd, expected: list[int], failure: str
) -> None:
    llm = odd("executors", "check_health", failure, first_call=2)
    llm._core.check_health()
    assert finish(llm, {})[0].token_ids == expected
    words = (
        "^odd$"
        if failure == "EngineDeadError"
        else failure_pattern("executors", "check_health", f"{failure}: odd")
    )
    with pytest.raises(EngineDeadError, match=words):
        llm._core.check_health()
    assert calls(llm, "executors", "check_health") == {"ok": 1, "error": 1}


@fault("executors", "shutdown")
@pytest.mark.parametrize("failure", ["RuntimeError", "Panic", "EngineDeadError"])
def test_an_executor_that_does_not_stop_is_logged(
    odd: Odd, expected: list[int], failure: str, caplog: pytest.LogCaptureFixture
) -> None:
    llm = odd("executors", "shutdown", failure)
    assert finish(llm, {})[0].token_ids == expected
    with caplog.at_level(logging.ERROR):
        llm.shutdown()
    assert "odd" in caplog.text and calls(llm, "executors", "shutdown") == {"error": 1}
    llm.shutdown()
    assert calls(llm, "executors", "shutdown") == {"error": 1}, "it is stopped once"


@fault("executors", "start", "shutdown")
def test_a_failed_start_is_stopped_and_the_cause_is_kept() -> None:
    engine_config = config("executors", "start")
    plugins = create_plugins(engine_config)
    with pytest.raises(PluginLoadError, match=failure_pattern("executors", "start")):
        start(plugins, engine_config)
    assert calls(plugins, "executors", "shutdown") == {"ok": 1}


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
    engine_config = config("executors", method)
    engine_config.plugins.plugin_file.append(str(file))
    plugins = create_plugins(engine_config)
    with pytest.raises(PluginLoadError):
        start(plugins, engine_config)
    assert any("configured released" in line for line in report(plugins))
