"""Policies, logits processors and stat loggers that fail: the request pays, or nobody does."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from engines import calls, failure_pattern, finish, healthy, name

from treadle import LLM
from treadle.errors import EngineDeadError, EngineError, PluginLoadError, RequestError
from treadle.plugins.guard import MAX_CONSECUTIVE_FAILURES

fault = pytest.mark.fault
Odd = Callable[..., LLM]

FATAL = r" \(plugin_strict makes it fatal\)"
ODD = {"extra_args": {"odd": "odd"}}
EVEN = {"extra_args": {"odd": "even"}}
RAISE = [("RuntimeError", "RuntimeError: odd"), ("Panic", "Panic: odd")]
SEVENS = [7] * 6


# ---------------------------------------------------------------------------- policies


@fault("scheduling_policies", "sort_key")
@pytest.mark.parametrize(
    ("failure", "cause"),
    [
        *RAISE,
        ("RequestError", "RequestError: odd"),
        ("None", "TypeError: 'NoneType' object is not iterable"),
        ("text", "ValueError: could not convert string to float: 'o'"),
        ("False", "TypeError: 'bool' object is not iterable"),
        ("few", r"ValueError: \(\) is not a sort key; a tuple of finite numbers is"),
    ],
)
def test_a_request_that_cannot_be_ordered_fails_alone(
    odd: Odd, expected: list[int], failure: str, cause: str
) -> None:
    llm = odd("scheduling_policies", "sort_key", failure)
    first, bad, last = finish(llm, {}, {"priority": 1}, {})
    assert first.token_ids == last.token_ids == expected
    assert bad.finish_reason == "error" and re.fullmatch(
        failure_pattern("scheduling_policies", "sort_key", cause), str(bad.error)
    )
    assert calls(llm, "scheduling_policies", "sort_key") == {"ok": 2, "error": 1}
    healthy(llm, expected)


@fault("scheduling_policies", "sort_key")
def test_in_strict_mode_it_ends_the_engine(odd: Odd) -> None:
    llm = odd("scheduling_policies", "sort_key", plugin_strict=True)
    with pytest.raises(
        EngineError, match=failure_pattern("scheduling_policies", "sort_key") + FATAL
    ):
        finish(llm, {"priority": 1})
    with pytest.raises(EngineDeadError, match=failure_pattern("scheduling_policies", "sort_key")):
        finish(llm, {})


CROWD = {"num_pages": 14, "page_size": 4, "max_num_seqs": 4}
LONG = {"max_tokens": 24}


@fault("scheduling_policies", "select_victim")
@pytest.mark.parametrize("failure", ["RuntimeError", "Panic", "None", "text", "negative"])
def test_without_a_victim_the_latest_arrival_makes_room(odd: Odd, failure: str) -> None:
    llm = odd("scheduling_policies", "select_victim", failure, **CROWD)
    outputs = finish(llm, *[LONG] * 4)
    assert [len(o.token_ids) for o in outputs] == [24] * 4
    assert llm.stats.num_preemptions > 0 and llm.stats.num_used_pages == 0
    assert calls(llm, "scheduling_policies", "select_victim") == {
        "error": llm.stats.num_preemptions
    }


def test_a_policy_cannot_reorder_what_runs(odd: Odd) -> None:
    """It gets a tuple: to sort or empty the scheduler's own list would be easy, and ruin it."""
    llm = odd("scheduling_policies", "never", **CROWD)
    arguments = []
    policy = llm._core.scheduler.policy

    def victim(running: Any) -> int:
        arguments.append(running)
        return len(running) - 1

    policy.select_victim = victim
    assert [len(o.token_ids) for o in finish(llm, *[LONG] * 4)] == [24] * 4
    assert arguments and all(type(running) is tuple for running in arguments)


@fault("scheduling_policies", "select_victim")
def test_in_strict_mode_there_must_be_a_victim(odd: Odd) -> None:
    llm = odd("scheduling_policies", "select_victim", plugin_strict=True, **CROWD)
    with pytest.raises(
        EngineError, match=failure_pattern("scheduling_policies", "select_victim") + FATAL
    ):
        finish(llm, *[LONG] * 4)
    with pytest.raises(EngineDeadError):
        finish(llm, {})


# -------------------------------------------------------------------- logits processors


@fault("logits_processors", "validate_params")
@pytest.mark.parametrize(("failure", "cause"), RAISE)
def test_a_request_that_cannot_be_checked_fails_alone(
    odd: Odd, expected: list[int], failure: str, cause: str
) -> None:
    llm = odd("logits_processors", "validate_params", failure)
    with pytest.raises(
        PluginLoadError, match=failure_pattern("logits_processors", "validate_params", cause)
    ):
        finish(llm, ODD)
    assert calls(llm, "logits_processors", "validate_params") == {"error": 1}
    (even,) = finish(llm, EVEN)
    assert even.token_ids == SEVENS
    healthy(llm, expected)


@fault("logits_processors", "validate_params")
def test_a_refusal_is_no_failure(odd: Odd) -> None:
    llm = odd("logits_processors", "validate_params", "RequestError", plugin_strict=True)
    with pytest.raises(RequestError, match=r"^odd$"):
        finish(llm, ODD)
    assert calls(llm, "logits_processors", "validate_params") == {"ok": 1}


@fault("logits_processors", "validate_params")
def test_in_strict_mode_a_check_that_raises_ends_the_engine(odd: Odd) -> None:
    llm = odd("logits_processors", "validate_params", plugin_strict=True)
    with pytest.raises(
        EngineError, match=failure_pattern("logits_processors", "validate_params") + FATAL
    ):
        finish(llm, ODD)
    with pytest.raises(EngineDeadError):
        finish(llm, {})


@fault("logits_processors", "apply")
@pytest.mark.parametrize(
    ("failure", "cause"),
    [
        *RAISE,
        ("RequestError", "RequestError: odd"),
        ("None", r"TypeError: it returned None; a tensor \[.* was expected"),
        ("text", r"TypeError: it returned .*; a tensor \[.* was expected"),
        ("narrow", r"TypeError: it returned a tensor \[.* was expected"),
        ("few", r"TypeError: it returned a tensor \[.* was expected"),
    ],
)
def test_a_row_that_cannot_be_edited_fails_alone(
    odd: Odd, expected: list[int], failure: str, cause: str
) -> None:
    llm = odd("logits_processors", "apply", failure)
    plain, bad, even = finish(llm, {}, ODD, EVEN)
    assert plain.token_ids == expected and even.token_ids == SEVENS
    assert bad.finish_reason == "error" and bad.token_ids == []
    pattern = failure_pattern("logits_processors", "apply", cause)
    assert re.fullmatch(pattern, str(bad.error), re.DOTALL), bad.error
    # Once for both of its rows, once for the bad one alone.
    assert calls(llm, "logits_processors", "apply") == {"error": 2, "ok": 6}
    healthy(llm, expected)


@fault("logits_processors", "apply")
def test_a_processor_that_leaves_no_number_is_named(odd: Odd, expected: list[int]) -> None:
    """Nothing raises, and the row without a token is found when the step is collected."""
    llm = odd("logits_processors", "apply", "NaN", first_call=2)
    plain, bad = finish(llm, {}, ODD)
    assert plain.token_ids == expected
    assert (bad.finish_reason, bad.token_ids) == ("error", [7])
    assert (
        bad.error
        == "logits_processors:odd left no token to sample: the logits are NaN or all masked"
    )
    assert calls(llm, "logits_processors", "apply") == {"ok": 2, "error": 1}
    healthy(llm, expected)


@fault("logits_processors", "apply")
@pytest.mark.parametrize("failure", ["RuntimeError", "NaN"])
def test_in_strict_mode_a_row_that_fails_ends_the_engine(odd: Odd, failure: str) -> None:
    llm = odd("logits_processors", "apply", failure, plugin_strict=True)
    with pytest.raises(EngineError, match="logits_processors:odd .*" + FATAL):
        finish(llm, {}, ODD)
    with pytest.raises(EngineDeadError):
        finish(llm, {})


# ------------------------------------------------------------------------- stat loggers


@fault("stat_loggers", "record")
@pytest.mark.parametrize("failure", ["RuntimeError", "Panic", "RequestError", "EngineDeadError"])
def test_a_logger_that_keeps_failing_is_given_up(
    odd: Odd, expected: list[int], failure: str
) -> None:
    llm = odd("stat_loggers", "record", failure)
    for output in finish(llm, {}, {}):
        assert output.token_ids == expected
    assert calls(llm, "stat_loggers", "record") == {"error": MAX_CONSECUTIVE_FAILURES}
    assert llm.stats.plugin_states["stat_loggers:odd"] == "broken"
    healthy(llm, expected)


@fault("stat_loggers", "record")
def test_a_logger_that_fails_now_and_then_is_kept(odd: Odd, expected: list[int]) -> None:
    llm = odd("stat_loggers", "record", first_call=2, times=MAX_CONSECUTIVE_FAILURES - 1)
    assert finish(llm, {})[0].token_ids == expected
    assert calls(llm, "stat_loggers", "record") == {"error": MAX_CONSECUTIVE_FAILURES - 1, "ok": 4}
    assert llm.stats.plugin_states["stat_loggers:odd"] == "loaded"


@fault("stat_loggers", "record")
def test_what_a_logger_returns_is_nobodys_business(odd: Odd, expected: list[int]) -> None:
    llm = odd("stat_loggers", "record", "text", plugin_strict=True)
    healthy(llm, expected)


@fault("stat_loggers", "record")
def test_in_strict_mode_a_logger_ends_the_engine(odd: Odd) -> None:
    llm = odd("stat_loggers", "record", plugin_strict=True)
    with pytest.raises(EngineError, match=failure_pattern("stat_loggers", "record") + FATAL):
        finish(llm, {})
    with pytest.raises(EngineDeadError, match="the engine has failed"):
        finish(llm, {})


@pytest.mark.parametrize(
    ("kind", "method", "params"),
    [
        ("scheduling_policies", "sort_key", {"priority": 1}),
        ("logits_processors", "apply", ODD),
        ("stat_loggers", "record", {}),
    ],
)
def test_an_interrupt_is_the_users(
    odd: Odd, kind: str, method: str, params: dict[str, Any]
) -> None:
    llm = odd(kind, method, "KeyboardInterrupt", times=1)
    with pytest.raises(KeyboardInterrupt):
        finish(llm, params)
    with pytest.raises(EngineDeadError, match="left in the middle by KeyboardInterrupt"):
        finish(llm, {})
    assert llm.stats.plugin_states[name(kind)] == "loaded"


@fault("scheduling_policies", "hook")
@fault("logits_processors", "hook")
@fault("stat_loggers", "hook")
@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("scheduling_policies", "sort_key"),
        ("logits_processors", "validate_params"),
        ("stat_loggers", "record"),
    ],
)
def test_an_object_without_the_methods_fails_the_start(odd: Odd, kind: str, method: str) -> None:
    """And not each request, or each step, that calls them."""
    with pytest.raises(PluginLoadError, match=rf"{name(kind)} .* it returned 'odd'; .*{method}"):
        odd(kind, "hook", "text")
