"""What a grammar may cost: its own request, within bounds, while all others go on."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from treadle.api.requests import EngineRequest
from treadle.api.sampling_params import StructuredOutputsParams
from treadle.errors import RequestError
from treadle.structured_output import compile_queue

pytestmark = pytest.mark.early

LONG = StructuredOutputsParams(json={"type": "string", "maxLength": 100000}, backend="outlines")
REPEATS = "(a{1,1000}){1,1000}"
FREE: dict[str, Any] = {"ignore_eos": True, "max_tokens": 200}


@pytest.mark.parametrize(
    "guided",
    [
        pytest.param(LONG, id="outlines"),
        pytest.param(
            StructuredOutputsParams(regex=REPEATS, backend="lm-format-enforcer"),
            id="lm-format-enforcer",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_bomb_is_refused_while_others_generate(
    engine: Callable[..., Any], guided: StructuredOutputsParams
) -> None:
    driven = engine()
    driven.add("warm", StructuredOutputsParams(regex="a", backend=guided.backend))
    assert driven.until("warm").finish_reason == "stop"
    driven.add("bomb", guided)
    steps, longest, start_time = 0, 0.0, time.monotonic()
    while "bomb" not in driven.ends:
        assert time.monotonic() - start_time < 60
        if f"other {steps // 200}" not in driven.tokens:
            driven.add(f"other {steps // 200}", **FREE)
        before = time.monotonic()
        driven.step()
        longest = max(longest, time.monotonic() - before)
        steps += 1
    end = driven.ends["bomb"]
    assert (
        end.finish_reason == "error" and end.param == "structured_outputs" and end.token_ids == []
    )
    assert "within 2 s of CPU" in end.error
    assert steps > 100 and sum(len(t) for n, t in driven.tokens.items() if n != "bomb") > 100
    seconds = time.monotonic() - start_time
    assert longest < seconds / 2, "the engine's thread waited for the compiler"
    driven.add("after", StructuredOutputsParams(regex="b", backend=guided.backend))
    assert driven.until("after").finish_reason == "stop", "the killed child is not replaced"
    start_time = time.monotonic()
    driven.add("again", guided)
    assert driven.until("again").error == end.error
    assert time.monotonic() - start_time < seconds / 2, "a failure is not kept"


ENDLESS = """
from treadle.api import impl

TREADLE = {"structured_output": ["endless"]}

class Endless:
    name = "endless"
    def unsupported_reason(self, spec):
        while True:
            pass

@impl
def treadle_grammar_compiler(name, tokenizer, vocab_size):
    return Endless() if name == "endless" else None
"""


def test_looking_for_a_refusal_is_limited_too(engine: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "endless.py"
    file.write_text(ENDLESS)
    driven = engine(plugin_file=[str(file)])
    driven.add("bomb", StructuredOutputsParams(regex="a", backend="endless"))
    assert "within 2 s of CPU" in driven.until("bomb").error


def test_a_large_schema_is_refused_at_once(engine: Callable[..., Any]) -> None:
    """In the thread of the engine: by its size, before anything looks at its parts."""
    part = {"type": "object", "properties": {"a": {"type": "string"}}}
    schema = {"type": "object", "properties": {f"p{i}": part for i in range(100_000)}}
    driven, start_time = engine(), time.process_time()
    with pytest.raises(RequestError, match="at most 65536"):
        driven.add("big", StructuredOutputsParams(json=schema))
    assert time.process_time() - start_time < 0.5


def test_llguidance_compiles_what_others_cannot(engine: Callable[..., Any]) -> None:
    driven = engine()
    for i, guided in enumerate((LONG, StructuredOutputsParams(regex=REPEATS))):
        import msgspec

        guided = msgspec.structs.replace(guided, backend="llguidance")
        driven.add(str(i), guided, max_tokens=5)
        assert driven.until(str(i)).finish_reason in ("length", "stop")


def test_an_abort_while_compiling(engine: Callable[..., Any]) -> None:
    driven = engine()
    driven.add("bomb", LONG)
    for _ in range(3):
        driven.step()
    assert driven.core.has_work and driven.core.stats.num_waiting == 1
    driven.core.abort_requests(["bomb"])
    assert not driven.core.has_work and driven.core.stats.num_waiting == 0
    driven.add("good", StructuredOutputsParams(regex="ab", backend="llguidance"))
    assert driven.until("good").finish_reason == "stop"
    assert "bomb" not in driven.ends


def test_closing_in_the_middle_of_a_bomb(engine: Callable[..., Any]) -> None:
    driven = engine()
    driven.add("warm", StructuredOutputsParams(regex="a", backend="outlines"))
    driven.until("warm")
    driven.add("bomb", LONG)
    time.sleep(0.2)
    pid = _child(driven).pid
    driven.core.close()
    time.sleep(0.1)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def _child(driven: Any) -> Any:
    return driven.core._structured_output._compilers._checker._children["outlines"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_compiler_that_crashes_costs_one_request(engine: Callable[..., Any], number: int) -> None:
    driven = engine()
    driven.add("warm", StructuredOutputsParams(regex="a", backend="outlines"))
    driven.until("warm")
    driven.add("bomb", LONG)
    time.sleep(0.2)
    os.kill(_child(driven).pid, number)
    assert "could not be compiled" in driven.until("bomb").error
    driven.add("after", StructuredOutputsParams(regex="b", backend="outlines"))
    assert driven.until("after").finish_reason == "stop"


def test_one_grammar_is_compiled_once(
    engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from treadle.structured_output.compilers import Compilers

    compiled: list[Any] = []
    compile = Compilers.compile

    def counted(self: Any, *args: Any) -> Any:
        compiled.append(args)
        return compile(self, *args)

    monkeypatch.setattr(Compilers, "compile", counted)
    driven = engine()
    for i in range(4):
        driven.add(f"same {i}", StructuredOutputsParams(json={"type": "integer"}), max_tokens=4)
    driven.add("spaced", StructuredOutputsParams(json=' {"type" :"integer"} '), max_tokens=4)
    driven.add(
        "other", StructuredOutputsParams(json={"type": "integer"}, backend="outlines"), max_tokens=4
    )
    for name in list(driven.tokens):
        driven.until(name)
    assert len(compiled) == 2


def test_a_ready_grammar_is_not_slept_through(
    engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treadle.engine.core.IDLE_SECONDS", 120.0)
    driven, start_time = engine(), time.monotonic()
    for name, regex in (("good", "ab"), ("known", "ab"), ("bad", "(")):
        driven.add(name, StructuredOutputsParams(regex=regex, backend="llguidance"))
        driven.until(name)
    assert time.monotonic() - start_time < 60


def test_a_grammar_that_is_kept_keeps_no_request(engine: Callable[..., Any]) -> None:
    """Its prompt may be long, and there are 256 grammars."""
    driven = engine()
    driven.add("forgotten", StructuredOutputsParams(regex="ab", backend="llguidance"))
    driven.until("forgotten")
    driven.add("after", max_tokens=2)
    driven.until("after")
    gc.collect()
    requests = [o for o in gc.get_objects() if type(o) is EngineRequest and o.id == "forgotten"]
    assert requests == []


def test_grammars_are_forgotten_by_number_and_size(
    engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_queue, "MAX_GRAMMARS", 3)
    driven = engine()
    grammars = driven.core._structured_output.queue.jobs
    for i in range(5):
        driven.add(str(i), StructuredOutputsParams(regex=f"a{{{i + 1}}}", backend="llguidance"))
        driven.until(str(i))
    assert [key[2] for key in grammars] == ["a{3}", "a{4}", "a{5}"]
    big = StructuredOutputsParams(json={"type": "string", "maxLength": 40}, backend="outlines")
    driven.add("big", big)
    driven.until("big")
    assert list(grammars.values())[-1].result().size > 1 << 18
    monkeypatch.setattr(compile_queue, "MAX_GRAMMAR_BYTES", 1 << 18)
    driven.add("last", StructuredOutputsParams(regex="b", backend="llguidance"))
    driven.until("last")
    assert [key[2] for key in grammars] == ["b"]


def test_named_backends_are_ready_before_the_first_request(engine: Callable[..., Any]) -> None:
    driven = engine(structured_output_backends=["llguidance"])
    compilers = driven.core._structured_output._compilers
    deadline = time.monotonic() + 30
    while (
        not compilers._checker._children or compilers._checker._children["llguidance"].pid is None
    ):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    driven.add("a", StructuredOutputsParams(regex="a"))
    driven.until("a")
    driven.core._structured_output.close()


def test_nothing_is_started_without_a_grammar(engine: Callable[..., Any]) -> None:
    driven = engine()
    driven.add("free", max_tokens=5)
    driven.until("free")
    manager = driven.core._structured_output
    assert not any(lane.threads._threads for lane in manager.queue._lanes())
    assert not manager._compilers._checker._children


def test_only_the_configured_backends_are_tried(engine: Callable[..., Any]) -> None:
    driven = engine(structured_output_backends=["lm-format-enforcer"])
    driven.add("a", StructuredOutputsParams(json={"type": "integer", "minimum": 3}))
    assert "lm-format-enforcer: minimum would be ignored" in driven.until("a").error
    with pytest.raises(RequestError, match="installed are"):
        engine(structured_output_backends=["nosuch"]).add("a", StructuredOutputsParams(regex="a"))
