"""A grammar backend that fails costs the request that wanted a grammar, and its neighbours nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import calls, config, failure_pattern, finish, healthy

from treadle import LLM
from treadle.api.sampling_params import StructuredOutputsParams
from treadle.config import PluginConfig
from treadle.errors import EngineDeadError, EngineError, PluginLoadError, RequestError
from treadle.plugins import PluginManager
from treadle.structured_output.manager import preferred_order

fault = pytest.mark.fault
Odd = Callable[..., LLM]

FATAL = r" \(plugin_strict makes it fatal\)"
RAISE = [("RuntimeError", "RuntimeError: odd"), ("Panic", "Panic: odd")]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """One engine for all: what goes wrong stands in the grammar."""
    with LLM(config=config("structured_output")) as engine:
        yield engine


def grammar(*words: object) -> dict[str, Any]:
    return {"structured_outputs": StructuredOutputsParams(regex=" ".join(map(str, words)))}


FINE = grammar("never", "RuntimeError", 1)


def count(llm: LLM, method: str, outcome: str) -> int:
    return calls(llm, "structured_output", method).get(outcome, 0)


@pytest.mark.parametrize("first_call", [2, 4])
@pytest.mark.parametrize(
    ("method", "counted", "failure", "cause"),
    [
        pytest.param(
            "fill_bitmask",
            "fill_bitmask",
            *RAISE[0],
            marks=fault("structured_output", "fill_bitmask"),
        ),
        pytest.param("fill_bitmask", "fill_bitmask", *RAISE[1]),
        pytest.param("fill_bitmask", "fill_bitmask", "RequestError", "RequestError: odd"),
        pytest.param(
            "accept_token",
            "accept_token",
            *RAISE[0],
            marks=fault("structured_output", "accept_token"),
        ),
        pytest.param("accept_token", "accept_token", *RAISE[1]),
        pytest.param(
            "is_accepting",
            "is_accepting",
            *RAISE[0],
            marks=fault("structured_output", "is_accepting"),
        ),
        pytest.param(
            "is_accepting", "is_accepting", "method", "TypeError: it is a method; it must be .*"
        ),
        pytest.param(
            "is_terminated",
            "is_terminated",
            *RAISE[0],
            marks=fault("structured_output", "is_terminated"),
        ),
        pytest.param("is_terminated", "is_terminated", "method", "TypeError: it is a method; .*"),
    ],
)
def test_a_matcher_that_fails_ends_its_output_alone(
    llm: LLM,
    expected: list[int],
    method: str,
    counted: str,
    failure: str,
    cause: str,
    first_call: int,
) -> None:
    errors = count(llm, counted, "error")
    bad, plain, fine = finish(llm, grammar(method, failure, first_call), {}, FINE)
    assert bad.finish_reason == "error" and plain.token_ids == expected
    assert fine.finish_reason == "length" and max(fine.token_ids) < 64
    message = "the grammar failed: " + failure_pattern("structured_output", counted, cause)
    assert re.fullmatch(message, str(bad.error)), bad.error
    assert count(llm, counted, "error") == errors + 1
    healthy(llm, expected)


@fault("structured_output", "fill_bitmask", "is_accepting")
@pytest.mark.parametrize(
    ("method", "failure", "cause"),
    [
        ("fill_bitmask", *RAISE[0]),
        ("fill_bitmask", *RAISE[1]),
        ("is_accepting", *RAISE[0]),
        ("is_accepting", "method", "TypeError: it is a method; it must be a property"),
    ],
)
def test_a_first_mask_that_fails_is_the_grammars_error(
    llm: LLM, expected: list[int], method: str, failure: str, cause: str
) -> None:
    """Some libraries notice only then that a grammar is wrong."""
    errors = count(llm, method, "error")
    words = f"enforce this: odd: the grammar failed: {failure_pattern('structured_output', method, cause)}$"
    with pytest.raises(RequestError, match=words):
        finish(llm, grammar(method, failure, 1), {}, FINE)
    assert count(llm, method, "error") == errors + 1
    healthy(llm, expected)


@fault("structured_output", "accept_token")
@pytest.mark.parametrize("failure", ["False", "None"])
def test_a_matcher_that_takes_back_what_it_allowed_ends_its_output(
    llm: LLM, expected: list[int], failure: str
) -> None:
    errors = count(llm, "accept_token", "error")
    bad, fine = finish(llm, grammar("accept_token", failure, 3), FINE)
    assert bad.finish_reason == "error" and len(bad.token_ids) == 2
    cause = r"ValueError: the grammar does not allow token \d+, which its mask allowed"
    assert re.fullmatch(
        "the grammar failed: " + failure_pattern("structured_output", "accept_token", cause),
        str(bad.error),
    )
    assert fine.finish_reason == "length"
    assert count(llm, "accept_token", "error") == errors + 1
    healthy(llm, expected)


@fault("structured_output", "rollback")
def test_nobody_rolls_back(llm: LLM, expected: list[int]) -> None:
    """This version does not speculate, so that a matcher whose rollback fails serves as others do."""
    (output,) = finish(llm, grammar("rollback", "RuntimeError", 1))
    assert output.finish_reason == "length"
    healthy(llm, expected)


@pytest.mark.parametrize(
    ("method", "failure", "words"),
    [
        pytest.param(
            "unsupported_reason",
            "RuntimeError",
            "odd",
            marks=fault("structured_output", "unsupported_reason"),
        ),
        pytest.param("unsupported_reason", "Panic", "odd"),
        pytest.param("compile", "RuntimeError", "odd", marks=fault("structured_output", "compile")),
        pytest.param("compile", "Panic", "odd"),
        pytest.param("compile", "None", "'NoneType' object has no attribute 'matcher'"),
        pytest.param("matcher", "KeyError", "'odd'", marks=fault("structured_output", "matcher")),
    ],
)
def test_a_grammar_that_does_not_compile_is_its_requests_error(
    llm: LLM, expected: list[int], method: str, failure: str, words: str
) -> None:
    """These are first called in a process of their own, where what raises is the grammar's."""
    errors = count(llm, "compile", "error")
    with pytest.raises(RequestError, match=re.escape(f"odd cannot compile the grammar: {words}")):
        finish(llm, grammar(method, failure, 1), {}, FINE)
    assert count(llm, "compile", "error") == errors + 1
    healthy(llm, expected)


@pytest.mark.parametrize(
    ("method", "counted", "failure", "cause"),
    [
        pytest.param("compile", "compile", *RAISE[0], marks=fault("structured_output", "compile")),
        pytest.param("compile", "compile", *RAISE[1]),
        (
            "compile",
            "compile",
            "None",
            "TypeError: it returned None; CompiledGrammar, with matcher, .*",
        ),
        pytest.param("matcher", "matcher", *RAISE[0], marks=fault("structured_output", "matcher")),
        pytest.param("matcher", "matcher", *RAISE[1]),
    ],
)
def test_what_fails_in_the_engine_alone_is_not_the_clients_fault(
    llm: LLM, expected: list[int], method: str, counted: str, failure: str, cause: str
) -> None:
    errors = count(llm, counted, "error")
    bad, plain, fine = finish(llm, grammar(method, failure, 1, os.getpid()), {}, FINE)
    assert bad.finish_reason == "error" and plain.token_ids == expected
    assert fine.finish_reason == "length"
    assert re.fullmatch(failure_pattern("structured_output", counted, cause), str(bad.error))
    assert count(llm, counted, "error") == errors + 1
    healthy(llm, expected)


@fault("structured_output", "hook")
@pytest.mark.parametrize(
    ("failure", "words"),
    [
        ("RuntimeError", failure_pattern("structured_output", "treadle_grammar_compiler")),
        ("Panic", failure_pattern("structured_output", "treadle_grammar_compiler", "Panic: odd")),
        ("None", "its treadle_grammar_compiler returned None"),
    ],
)
def test_a_compiler_that_cannot_be_opened_fails_who_asks(
    odd: Odd, expected: list[int], failure: str, words: str
) -> None:
    llm = odd("structured_output", "hook", failure)
    for _ in range(2):
        bad, plain = finish(llm, FINE, {})
        assert bad.finish_reason == "error" and re.search(words, str(bad.error)), bad.error
        assert plain.token_ids == expected
    healthy(llm, expected)


@fault("structured_output", "unsupported_reason")
def test_a_refusal_that_is_no_text_is_a_refusal(llm: LLM, expected: list[int]) -> None:
    with pytest.raises(RequestError, match="can enforce this: odd: False"):
        finish(llm, grammar("unsupported_reason", "False", 1), {})
    healthy(llm, expected)


@fault("structured_output", "hook")
def test_a_backend_that_cannot_be_made_ready_is_told_at_the_start(
    odd: Odd, caplog: pytest.LogCaptureFixture
) -> None:
    """Only backends that the configuration names are made ready before a request asks for them."""
    llm = odd("structured_output", "hook")
    (lane,) = llm._core._structured_output.queue._quick.values()
    lane.threads.shutdown()  # waits for what it was given
    message = failure_pattern("structured_output", "treadle_grammar_compiler")
    assert any(
        r.name == "treadle.structured_output" and re.search(message, r.getMessage())
        for r in caplog.records
    )


def test_a_grammar_that_a_plugin_has_failed_on_is_tried_again(odd: Odd) -> None:
    """Failures are kept with their grammars; this one was not the grammar's."""
    llm = odd("structured_output", "hook")
    assert finish(llm, FINE)[0].finish_reason == "error"
    llm.config.plugins.plugin_options["structured_output:odd"]["method"] = "never"
    assert finish(llm, FINE)[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("method", "first_call", "words"),
    [
        ("fill_bitmask", 3, failure_pattern("structured_output", "fill_bitmask")),
        ("accept_token", 2, failure_pattern("structured_output", "accept_token")),
        ("matcher", 1, failure_pattern("structured_output", "matcher")),
        ("compile", 1, failure_pattern("structured_output", "compile")),
    ],
)
def test_in_strict_mode_it_ends_the_engine(
    odd: Odd, method: str, first_call: int, words: str
) -> None:
    llm = odd("structured_output", plugin_strict=True)
    with pytest.raises(EngineError, match=words + FATAL):
        finish(llm, grammar(method, "RuntimeError", first_call, os.getpid()), {})
    with pytest.raises(EngineDeadError, match="the engine has failed"):
        finish(llm, {})


@fault("structured_output", "hook")
def test_in_strict_mode_a_compiler_that_cannot_be_opened_ends_the_engine(odd: Odd) -> None:
    llm = odd("structured_output", "hook", plugin_strict=True)
    with pytest.raises(
        EngineError, match=failure_pattern("structured_output", "treadle_grammar_compiler") + FATAL
    ):
        finish(llm, FINE)


def test_calls_of_matchers_are_counted_and_timed(llm: LLM) -> None:
    def seconds(method: str) -> tuple[int, float]:
        rows = llm.stats.plugin_seconds
        return next(
            ((n, s) for p, h, n, s in rows if (p, h) == ("structured_output:odd", method)), (0, 0.0)
        )

    finish(llm, FINE)  # its first mask is tried when it is compiled
    before = {method: seconds(method) for method in ("fill_bitmask", "accept_token")}
    finish(llm, FINE, FINE, {})
    for method, (n, elapsed) in before.items():
        now, total = seconds(method)
        assert now == n + 2 * 6, "once for each token of each output that has a grammar"
        assert 0 < total - elapsed < 30


def test_a_matcher_cannot_write_into_the_masks_of_others() -> None:
    import torch

    from treadle.structured_output import StructuredOutputState

    class Greedy:
        is_accepting = is_terminated = False

        def fill_bitmask(self, bitmask: torch.Tensor, row: int) -> None:
            bitmask.zero_()
            bitmask[row, 0] = 2

    masks = torch.full((3, 10), -1, dtype=torch.int32)
    StructuredOutputState(Greedy()).fill_bitmask(masks, 1, ())  # type: ignore[arg-type]
    assert masks[1, 0] == 2 and not masks[1, 1:].any()
    assert (masks[0] == -1).all() and (masks[2] == -1).all()


PREFERENCES = """
from treadle.api import impl
from treadle.api.matching import Match

TREADLE = {"structured_output": ["KEY"]}


@impl
def treadle_grammar_compiler(name):
    return object()


@impl
def treadle_match(kind, key, model):
    if key == "broken":
        raise RuntimeError("odd")
    return Match({"first": 20, "second": 10}[key], "because the test says so")
"""


@fault("structured_output", "treadle_match")
def test_a_backend_that_cannot_state_its_preference_is_tried_last(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = []
    for key in ("first", "broken", "second"):
        (tmp_path / f"{key}.py").write_text(PREFERENCES.replace("KEY", key))
        files.append(str(tmp_path / f"{key}.py"))
    plugins = PluginManager(PluginConfig(plugin_file=files), source=list)
    assert preferred_order(plugins) == ["first", "second", "broken"]
    assert "structured_output:broken" in caplog.text and "RuntimeError: odd" in caplog.text
    strict = PluginManager(PluginConfig(plugin_file=files, plugin_strict=True), source=list)
    with pytest.raises(
        PluginLoadError, match=r"structured_output:broken .*treadle_match: RuntimeError: odd"
    ):
        preferred_order(strict)
