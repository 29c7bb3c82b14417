"""A matcher that fails in the middle of an output, at any point, costs that output."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from treadle.api.sampling_params import StructuredOutputsParams
from treadle.api.structured_output import GrammarSpec
from treadle.errors import EngineError
from treadle.structured_output import StructuredOutputState
from treadle.structured_output.checker import _checked


class Panic(BaseException):
    """Like a panic of a Rust library, which is no Exception."""


class Scripted:
    """Allows every id but the last 64, and fails at step ``at`` in the way ``how``."""

    is_accepting = is_terminated = False

    def __init__(self, failure: str, call_index: int) -> None:
        self.failure, self.remaining = failure, call_index

    def fill_bitmask(self, bitmask: torch.Tensor, row: int) -> None:
        if self.failure == "empty" and not self.remaining:
            bitmask[row].zero_()
            return
        self._fail("fill")
        bitmask[row].fill_(-1)
        bitmask[row, -2:] = 0

    def accept_token(self, token: int) -> bool:
        assert token < 256, "the mask was not heeded"
        if self.failure == "refuse" and not self.remaining:
            return False
        self._fail("accept")
        self.remaining -= 1
        return True

    def rollback(self, count: int) -> None:
        raise NotImplementedError

    def _fail(self, method: str) -> None:
        if self.failure in (method, f"panic in {method}") and not self.remaining:
            raise Panic("oh") if "panic" in self.failure else KeyError("oh")


SAID = {
    "fill": "KeyError",
    "accept": "KeyError",
    "panic in fill": "Panic",
    "panic in accept": "Panic",
    "refuse": "does not allow token",
    "empty": "dead end",
}


@pytest.mark.parametrize("failure", list(SAID))
def test_a_fault_ends_its_sequence_only(engine: Callable[..., Any], failure: str) -> None:
    driven = engine(max_num_seqs=16)
    guides = {f"bad {index}": StructuredOutputState(Scripted(failure, index)) for index in range(8)}

    def submit(request: Any) -> Future[StructuredOutputState]:
        ready: Future[StructuredOutputState] = Future()
        ready.set_result(guides[request.id])
        return ready

    driven.core._structured_output.submit = submit
    driven.add("free", ignore_eos=True, max_tokens=20)
    reference = engine()
    reference.add("free", ignore_eos=True, max_tokens=20)
    reference.until("free")
    for name in guides:
        driven.add(name, StructuredOutputsParams(regex="a"), max_tokens=50)
    driven.until("free")
    for index, name in enumerate(guides):
        end = driven.until(name)
        assert end.finish_reason == "error" and SAID[failure] in end.error, end
        assert end.param == "structured_outputs", "the server is well, and says so"
        assert len(driven.tokens[name]) == index
    assert driven.tokens["free"] == reference.tokens["free"]
    assert not driven.core.has_work and driven.core.stats.num_used_pages == 0


@pytest.mark.parametrize("failure", ["fill", "accept", "panic in fill", "panic in accept"])
def test_in_strict_mode_a_fault_is_the_engines(failure: str) -> None:
    guide = StructuredOutputState(Scripted(failure, 0), strict=True)
    with pytest.raises(EngineError, match=r"the grammar failed: .*oh.*plugin_strict"):
        if "fill" in failure:
            guide.fill_bitmask(torch.zeros(1, 10, dtype=torch.int32), 0, ())
        else:
            guide.accept_token(1)


@pytest.mark.parametrize("failure", ["refuse", "empty"])
def test_a_grammar_without_a_way_on_is_no_fault(failure: str) -> None:
    guide = StructuredOutputState(Scripted(failure, 0), strict=True)
    guide.fill_bitmask(torch.zeros(1, 10, dtype=torch.int32), 0, ())
    if failure == "refuse":
        guide.accept_token(1)
    assert guide.error is not None and guide.has_ended


def test_signals_are_not_swallowed() -> None:
    class Interrupted(Scripted):
        def _fail(self, where: str) -> None:
            raise KeyboardInterrupt

    guide = StructuredOutputState(Interrupted("", 0))
    with pytest.raises(KeyboardInterrupt):
        guide.fill_bitmask(torch.zeros(1, 10, dtype=torch.int32), 0, ())
    with pytest.raises(KeyboardInterrupt):
        guide.accept_token(1)


def test_the_plugin_may_fail_when_it_makes_a_matcher(
    engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from treadle.structured_output.compilers import Compilers, SizedGrammar

    class Broken:
        def matcher(self) -> Any:
            raise Panic("no matcher")

    monkeypatch.setattr(Compilers, "compile", lambda *_: SizedGrammar(Broken(), 0))
    driven = engine()
    driven.add("a", StructuredOutputsParams(regex="a"))
    end = driven.until("a")
    assert end.error is not None and "no matcher" in end.error and end.param == "structured_outputs"


@pytest.mark.fault("structured_output", "unenforced")
def test_what_a_backend_says_of_the_rest_is_a_text_or_an_error() -> None:
    """In the process that compiles first: a strange answer is written out, and a failure is one of the grammar."""

    class Backend:
        name = "x"

        def __init__(self, answer: Any) -> None:
            self.answer = answer

        def unsupported_reason(self, spec: GrammarSpec) -> str | None:
            return None

        def compile(self, spec: GrammarSpec) -> Any:
            return SimpleNamespace(matcher=lambda: Scripted("", 0))

        def unenforced(self, spec: GrammarSpec) -> Any:
            return self.answer() if callable(self.answer) else self.answer

    spec = GrammarSpec("regex", "a")
    for answer, unenforced in ((None, None), ("x", "x"), (7, "7"), ("y" * 10_000, "y" * 4096)):
        assert _checked(Backend(answer), spec).unenforced == unenforced
    assert _checked(Backend(lambda: 1 / 0), spec).error == "division by zero"
