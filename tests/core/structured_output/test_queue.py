"""Whose grammar is compiled next, how many may wait, and what becomes of those who leave."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from treadle import LLM, AsyncLLM, SamplingParams
from treadle.api.requests import EngineRequest
from treadle.api.sampling_params import StructuredOutputsParams
from treadle.errors import QueueFullError

STAGED = """
import os
import signal
from pathlib import Path

from treadle.api import impl
from treadle_structured_output_kit.llguidance import LLGuidanceCompiler

TREADLE = {"structured_output": ["staged"]}


class Staged:
    # A regex "a|wait|FILE" is ready once FILE has two lines, one for each process that has seen it.
    name = "staged"

    def __init__(self, tokenizer, vocab_size):
        self._compiler = LLGuidanceCompiler(tokenizer, vocab_size)

    def unsupported_reason(self, spec):
        return None

    def compile(self, spec):
        regex, _, rest = spec.source.partition("|")
        what, _, path = rest.partition("|")
        if what == "spin":
            while True:
                pass
        if what == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if what == "wait":
            calls = Path(path)
            with calls.open("a") as file:
                file.write(f"{os.getpid()} {os.getppid()}\\n")
            while len(calls.read_text().splitlines()) < 2:
                signal.pause()
        return self._compiler.compile_regex(regex)


@impl
def treadle_grammar_compiler(name, tokenizer, vocab_size):
    return Staged(tokenizer, vocab_size)
"""


@pytest.fixture
def plugin(tmp_path: Path) -> str:
    file = tmp_path / "staged.py"
    file.write_text(STAGED)
    return str(file)


@pytest.fixture
def staged(engine: Callable[..., Any], plugin: str) -> Callable[..., Any]:
    """An engine whose backend is ready, so that no test waits for that."""

    def make(**options: Any) -> Any:
        driven = engine(plugin_file=[plugin], **options)
        driven.add("warm", wanted("b"))
        driven.until("warm")
        return driven

    return make


def wanted(source: str, backend: str = "staged") -> StructuredOutputsParams:
    return StructuredOutputsParams(regex=source, backend=backend)


def add(driven: Any, name: str, source: str, client: str = "") -> None:
    params = SamplingParams(structured_outputs=wanted(source), max_tokens=4)
    request = EngineRequest(name, [1, 2, 3], params, time.monotonic(), client=client)
    driven.core.add_request(request)
    driven.tokens[name] = []


def calls(path: Path, count: int = 1) -> list[tuple[int, int]]:
    """The process and its parent of each of the first ``count`` compilations."""
    for _ in range(6000):
        lines = path.read_text().splitlines() if path.exists() else []
        if len(lines) >= count:
            return [(int(a), int(b)) for a, b in (line.split() for line in lines)]
        time.sleep(0.01)
    raise AssertionError(f"{path} has no {count} calls")


def let_go(path: Path) -> None:
    """Let the grammar of ``path``, which is being compiled, fail; it is no one else's."""
    os.kill(calls(path)[0][0], signal.SIGTERM)


def test_bad_grammars_do_not_hold_up_a_good_one(staged: Callable[..., Any]) -> None:
    driven = staged()
    for i in range(4):
        add(driven, f"bomb {i}", f"{i}|spin", client="a")
    add(driven, "good", "c", client="b")
    assert driven.until("good").finish_reason == "stop"
    assert not [name for name in driven.ends if name.startswith("bomb")]
    driven.core.abort_requests([f"bomb {i}" for i in range(4)])
    assert not driven.core.has_work and driven.core.stats.num_grammars_waiting == 0


def test_clients_take_turns(
    staged: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "treadle.structured_output.compile_queue.SHARE", 1e-6
    )  # nothing is forgiven
    driven = staged()
    add(driven, "first", f"a|wait|{tmp_path}/first", client="a")
    calls(tmp_path / "first")
    for i in range(5):
        add(driven, f"a{i}", f"a{i}", client="a")
    add(driven, "b0", "longer than those of the other client", client="b")
    queue = driven.core._structured_output.queue
    job = queue._quick["staged"].queue.pop()
    assert job is not None and job.client == "b"
    queue._push(queue._quick["staged"], job)
    let_go(tmp_path / "first")
    for name in ("a4", "b0"):
        assert driven.until(name).finish_reason in ("stop", "length")
    assert driven.until("first").finish_reason == "error"


def test_what_is_known_to_be_slow_waits_with_the_slow(
    staged: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treadle.structured_output.compile_queue.CPU_SECONDS", 0.3)
    monkeypatch.setattr("treadle.structured_output.checker.CPU_SECONDS", 0.3)
    driven = staged()
    queue = driven.core._structured_output.queue
    add(driven, "bomb", "a|spin")
    assert "could not be compiled" in driven.until("bomb").error
    queue.jobs.clear()  # forgotten, but for its time
    taken: list[Any] = []
    monkeypatch.setattr(queue, "_push", lambda lane, job: taken.append(lane))
    add(driven, "again", "a|spin")
    add(driven, "known", "d")
    assert taken == [queue._slow, queue._quick["staged"]]
    driven.core.abort_requests(["again", "known"])


@pytest.fixture
def busy(staged: Callable[..., Any], tmp_path: Path) -> Iterator[Any]:
    """An engine with room for four grammars, whose backend compiles one that never ends."""
    driven = staged(max_num_queued_grammars=4)
    add(driven, "endless", f"a|wait|{tmp_path}/endless", client="z")
    calls(tmp_path / "endless")
    yield driven
    driven.core.close()


def test_what_waits_is_bounded(busy: Any) -> None:
    for i, client in enumerate("aabb"):
        add(busy, str(i), f"a{i}", client=client)
    assert busy.core.stats.num_grammars_waiting == 4
    with pytest.raises(
        QueueFullError, match=r"4 grammars wait .* max_num_queued_grammars allows 4"
    ):
        add(busy, "c", "ac", client="c")
    add(busy, "same", "a1", client="c")  # nothing more to compile
    assert busy.core.stats.grammars_rejected == 1
    busy.core.abort_requests(["0"])
    add(busy, "c", "ac", client="c")
    assert busy.core.stats.num_waiting == 6


def test_one_client_may_have_half_of_the_places(busy: Any) -> None:
    for i in range(2):
        add(busy, str(i), f"a{i}", client="a")
    with pytest.raises(QueueFullError, match="2 of them of this client"):
        add(busy, "more", "more", client="a")
    add(busy, "other", "other", client="b")
    for i in range(2, 5):
        add(busy, f"program {i}", "other")  # what has no client is not held to it
    assert busy.core.stats.num_grammars_waiting == 3


def test_who_leaves_frees_a_place(busy: Any, tmp_path: Path) -> None:
    add(busy, "gone", f"a|wait|{tmp_path}/gone", client="a")
    for name in ("stays", "leaves"):
        add(busy, name, "shared", client="a")
    assert busy.core.stats.num_grammars_waiting == 2
    busy.core.abort_requests(["gone", "leaves"])
    assert busy.core.stats.num_grammars_waiting == 1
    let_go(tmp_path / "endless")
    assert busy.until("stays").finish_reason in ("stop", "length")
    assert not (tmp_path / "gone").exists(), "it was compiled for nobody"
    (tmp_path / "gone").write_text("0 0\n0 0\n")
    add(busy, "back", f"a|wait|{tmp_path}/gone", client="b")
    assert busy.until("back").finish_reason in ("stop", "length"), "it is ordered anew"


def test_a_slow_one_that_everybody_leaves_is_dropped(
    staged: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven = staged()
    queue = driven.core._structured_output.queue
    add(driven, "leaves", f"a|wait|{tmp_path}/slow")
    calls(tmp_path / "slow")
    driven.core.abort_requests(["leaves"])
    (job,) = [job for job in queue.jobs.values() if not job.done()]
    os.kill(calls(tmp_path / "slow")[0][0], signal.SIGPROF)  # as if its CPU time were over
    while not job.done():
        time.sleep(0.01)
    assert job.cancelled() and queue.num_pending == 0
    add(driven, "comes", f"a|wait|{tmp_path}/slow")
    assert driven.until("comes").finish_reason in ("stop", "length")


@pytest.mark.parametrize("victim", ["fork", "server"])
def test_who_was_killed_by_others_is_compiled_again(
    staged: Callable[..., Any], tmp_path: Path, victim: str
) -> None:
    driven, path = staged(), tmp_path / "calls"
    add(driven, "innocent", f"a|wait|{path}")
    ((fork, server),) = calls(path)
    add(driven, "pending", "c")
    os.kill(server if victim == "server" else fork, signal.SIGKILL)
    if victim == "server":
        os.kill(fork, signal.SIGKILL)
    for name in ("innocent", "pending"):
        assert driven.until(name).finish_reason in ("stop", "length"), driven.ends[name]
    assert len(calls(path)) == 3, "twice there, once in the engine"


def test_a_crash_is_the_grammars_own(staged: Callable[..., Any]) -> None:
    driven = staged()
    add(driven, "crash", "a|crash")
    add(driven, "next", "c")
    assert "(the process was killed by SIGSEGV)" in driven.until("crash").error
    assert driven.until("next").finish_reason == "stop"
    stats = driven.core.stats
    assert (stats.grammars_compiled, stats.grammars_failed) == (2, 1)


def test_an_idle_compiler_that_was_killed_is_replaced(staged: Callable[..., Any]) -> None:
    driven = staged()
    child = driven.core._structured_output._compilers._checker._children["staged"]
    os.kill(child.pid, signal.SIGKILL)
    add(driven, "next", "c")
    assert driven.until("next").finish_reason == "stop"


def test_a_program_waits_for_room(folder: Path, plugin: str) -> None:
    """``LLM`` gives the engine more when there is room, so that no prompt of a list fails."""
    options: dict[str, Any] = {"plugin_file": [plugin], "max_num_queued_grammars": 1}
    with LLM(str(folder), cpu_threads=1, num_pages=64, **options) as llm:
        params = [SamplingParams(structured_outputs=wanted("c" * (i + 1))) for i in range(8)]
        outputs = llm.generate(["x"] * 8, params, use_tqdm=False)
    assert [output.outputs[0].text for output in outputs] == ["c" * (i + 1) for i in range(8)]


async def test_a_frontend_is_told(folder: Path, plugin: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"plugin_file": [plugin], "max_num_queued_grammars": 1}
    async with AsyncLLM(str(folder), cpu_threads=1, num_pages=64, **options) as engine:
        first, *rest = [
            engine.submit(await engine.prepare("x", SamplingParams(structured_outputs=wanted(w))))
            for w in (f"{word}|wait|{tmp_path}/{word}" for word in "abcdefgh")
        ]
        with pytest.raises(QueueFullError, match="max_num_queued_grammars allows 1"):
            for stream in reversed(rest):
                async for _ in stream:
                    raise AssertionError("it was compiled")
        for stream in (first, *rest):
            await stream.aclose()
        while (stats := await engine.stats()).num_waiting:
            pass
        assert stats.num_grammars_waiting == 0 and stats.grammars_rejected > 0
