"""``--isolate`` of grammar backends: a fault costs the requests with their grammars, and no other."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from grammar_plugin import close, process_of, write_plugin

from treadle.api.kinds import STRUCTURED_OUTPUT, TOOL_PARSERS
from treadle.api.structured_output import GrammarSpec, SupportsGrammarBatches
from treadle.config import PluginConfig
from treadle.errors import PluginLoadError
from treadle.plugins import PluginManager
from treadle.plugins.boundary import unwrap
from treadle.processes.watchdog import MAX_STUCK_THREADS, RETRY_SECONDS
from treadle.structured_output import StructuredOutputState
from treadle.structured_output.batch import GrammarBatch, GrammarRow
from treadle.testing.grammar_vocabulary import SmallTokenizer
from treadle_server.isolation import plugin as isolation
from treadle_server.isolation import process as isolated_process
from treadle_server.isolation import proxies, refused

VOCAB = 384
KEYS = ["mine", "together"]


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PluginManager]:
    """One process for all tests, as its start is what takes time."""
    file = write_plugin(tmp_path_factory.mktemp("plugin"))
    plugins = PluginManager(PluginConfig(plugin_file=[file], isolate=["structured_output:mine"]))
    yield plugins
    close(plugins)


@pytest.fixture
def short_limits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """For what hangs; whatever else a test calls has to answer in time, too."""
    if request.node.callspec.params["fault"] == "hang":
        monkeypatch.setitem(isolation.SECONDS, "structured_output", 1.0)
        monkeypatch.setattr(proxies, "OPEN_SECONDS", 1.0)


def compiler_of(plugins: PluginManager, key: str = "mine") -> Any:
    return plugins.create_guarded(
        STRUCTURED_OUTPUT, key, tokenizer=SmallTokenizer(), vocab_size=VOCAB
    )


class Rows:
    """Sequences of a step, by their grammars."""

    def __init__(self, compiler: Any, *sources: str) -> None:
        self.states: list[StructuredOutputState] = []
        self.texts: list[str] = []
        for source in sources:
            self.add(compiler, source)

    def add(self, compiler: Any, source: str) -> None:
        matcher = compiler.compile(GrammarSpec("regex", source)).matcher()
        self.states.append(StructuredOutputState(matcher, batches=compiler))
        self.texts.append("")

    def step(self) -> None:
        """Take the only token that each row allows."""
        rows = [i for i, state in enumerate(self.states) if not state.has_ended]
        bitmask = torch.full((len(rows), VOCAB // 32 + 1), 0x55555555, dtype=torch.int32)
        batch = GrammarBatch([(i, self.states[i], (), ()) for i in rows])
        batch.fill_bitmasks(bitmask, VOCAB)
        accepted: list[GrammarRow] = []
        tokens = []
        for line, i in zip(bitmask, rows, strict=True):
            if self.states[i].error is None:
                (token,) = (t for t in range(VOCAB) if int(line[t // 32]) >> t % 32 & 1)
                self.texts[i] += SmallTokenizer().token_bytes(token).decode()
                accepted.append((i, self.states[i], (), ()))
                tokens.append(token)
        GrammarBatch(accepted).accept_tokens(tokens)

    def run(self) -> list[str | None]:
        """Return what went wrong with each."""
        while not all(state.has_ended for state in self.states):
            self.step()
        return [state.error for state in self.states]


# ------------------------------------------------------------------------- as if it were here


@pytest.mark.parametrize("key", KEYS)
def test_rows_of_a_step_are_one_message(
    plugins: PluginManager, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = compiler_of(plugins, key)
    assert compiler.name == key and isinstance(compiler, SupportsGrammarBatches)
    rows = Rows(compiler, "abc", "b", "abcd")
    messages: list[str] = []
    exchange = isolated_process.PluginProcess._exchange

    def counted(self: Any, call: Any, *arguments: Any) -> Any:
        messages.append(call.method)
        return exchange(self, call, *arguments)

    monkeypatch.setattr(isolated_process.PluginProcess, "_exchange", counted)
    rows.step()
    assert messages == ["fill_bitmasks", "accept_tokens"]
    assert rows.run() == [None] * 3
    assert rows.texts == ["abc", "b", "abcd"]


def test_a_matcher_by_itself(plugins: PluginManager) -> None:
    matcher = compiler_of(plugins).compile(GrammarSpec("regex", "ab")).matcher()
    a, b = SmallTokenizer().encode("ab")
    assert unwrap(matcher).accept_token(b) is False and matcher.accept_token(a)
    matcher.rollback(1)
    mask = torch.full((3, VOCAB // 32), 0x55555555, dtype=torch.int32)
    matcher.fill_bitmask(mask, 1)
    assert mask[1].nonzero().flatten().tolist() == [a // 32]
    assert (mask[[0, 2]] == 0x55555555).all()
    assert (matcher.is_accepting, matcher.is_terminated) == (False, False)
    process = process_of(plugins)
    del matcher
    assert len(process._freed) == 3, "a grammar that nobody uses stays in the process"


def test_the_vocabulary_is_read_in_pages(plugins: PluginManager) -> None:
    asked = []

    class Counting(SmallTokenizer):
        def token_bytes(self, token: int) -> bytes:
            asked.append(token)
            return super().token_bytes(token)

    process_of(plugins).close()  # a process asks once
    plugins.create(STRUCTURED_OUTPUT, "mine", tokenizer=Counting(), vocab_size=VOCAB)
    assert asked == list(range(SmallTokenizer().vocab_size)), "the last id was asked for alone"


def test_grammars_have_a_process_of_their_own(plugins: PluginManager) -> None:
    with pytest.raises(PluginLoadError, match="no parser"):
        plugins.create(TOOL_PARSERS, "mine", tokenizer=SmallTokenizer(), tools=())
    compiler_of(plugins)
    stand_in: Any = plugins.load("structured_output", "mine")
    assert len({process.pid for process in stand_in.processes.values()}) == 2


def test_a_step_does_not_wait_for_a_grammar(plugins: PluginManager) -> None:
    """It is compiled beside, and asks the tokenizer after the step that it has waited for."""
    compiler = compiler_of(plugins)
    rows = Rows(compiler, "ab~accept release 1")
    with ThreadPoolExecutor(1) as pool:
        grammar = pool.submit(compiler.compile, GrammarSpec("regex", "xy~compile wait 0"))
        assert rows.run() == [None]
        (x, _) = SmallTokenizer().encode("xy")
        assert grammar.result().matcher().accept_token(x)


# ------------------------------------------------------------------------------ what it costs


@pytest.mark.parametrize(
    ("key", "place", "fault"),
    [
        ("mine", "fill", "raise"),
        ("mine", "accept", "sys.exit"),
        ("mine", "accepting", "raise"),
        ("mine", "accept", "memory"),
        ("together", "fill", "memory"),
        ("together", "fill", "sys.exit"),
    ],
)
def test_a_fault_costs_its_own_request(
    plugins: PluginManager, key: str, place: str, fault: str
) -> None:
    compiler = compiler_of(plugins, key)
    error, fine = Rows(compiler, f"abc~{place} {fault} 1", "abcd").run()
    assert error is not None and f"structured_output:{key} from mine_" in error
    assert fine is None


@pytest.mark.parametrize(
    ("key", "place", "fault", "words"),
    [
        ("mine", "fill", "hang", r"did not answer within 1 s and was ended"),
        ("mine", "accept", "exit", "exited with status 3"),
        ("together", "fill", "segfault", "its state is lost"),
        ("together", "accept", "hang", r"did not answer within 1 s and was ended"),
    ],
)
def test_a_lost_process_costs_the_grammars_in_it(
    plugins: PluginManager, key: str, place: str, fault: str, words: str, short_limits: None
) -> None:
    """Those that come later get another process, also beside what is lost."""
    compiler = compiler_of(plugins, key)
    kept = compiler.compile(GrammarSpec("regex", "xy"))
    resting = Rows(compiler, "ab")
    error, bystander = Rows(compiler, f"abc~{place} {fault} 1", "abcd").run()
    for text in (error, bystander):
        assert f"structured_output:{key} from mine_" in str(text)
    assert re.search(words, str(bystander)) or "its state is lost" in str(bystander)
    resting.add(compiler, "abcd")
    lost, fine = resting.run()
    assert "its state is lost" in str(lost) and fine is None and resting.texts[1] == "abcd"
    assert kept.matcher().accept_token(SmallTokenizer().encode("x")[0]), "compiled again"


def test_a_process_that_somebody_kills(plugins: PluginManager) -> None:
    compiler = compiler_of(plugins)
    rows = Rows(compiler, "ab", "abc")
    process = process_of(plugins)
    os.kill(process.pid, signal.SIGKILL)
    process._process._child.wait()
    assert all("its state is lost" in str(error) for error in rows.run())
    assert Rows(compiler, "ab").run() == [None]


@pytest.mark.parametrize(
    ("place", "fault", "words"),
    [
        ("compile", "hang", r"did not answer within 1 s and was ended"),
        ("matcher", "exit", "the process exited with status 3"),
        ("compile", "memory", "MemoryError"),
        ("compile", "raise", "ValueError: boom"),
        ("matcher", "raise", "ValueError: boom"),
    ],
)
def test_a_fault_beside_the_steps(
    plugins: PluginManager, place: str, fault: str, words: str, short_limits: None
) -> None:
    compiler = compiler_of(plugins)
    with pytest.raises(PluginLoadError, match=f"structured_output:mine from mine_.*{words}"):
        compiler.compile(GrammarSpec("regex", f"a~{place} {fault} 0")).matcher()
    assert Rows(compiler, "ab").run() == [None]


@pytest.mark.parametrize("place", ["accept", "compile"])
def test_a_result_of_a_wrong_type(plugins: PluginManager, place: str) -> None:
    compiler = compiler_of(plugins)
    if place == "compile":
        with pytest.raises(PluginLoadError, match=r"mine from mine_.*'int' object"):
            compiler.compile(GrammarSpec("regex", "a~compile wrong 0")).matcher()
        return
    error, fine = Rows(compiler, "abc~accept wrong 1", "abc").run()
    assert error is not None and fine is None


@pytest.mark.parametrize(
    "reply",
    [
        [b"", [True]],
        [b"\0" * 52, []],
        [b"\0" * 52, [3]],
        [7, [None]],
        None,
        [b"\0" * 52, [True]] * 2,
    ],
)
def test_masks_that_are_none(
    plugins: PluginManager, reply: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process sends what it likes, which changes no mask of another row."""
    compiler = compiler_of(plugins)
    rows = Rows(compiler, "ab")
    call = isolated_process.PluginProcess.call

    def answered(self: Any, message: Any, *arguments: Any) -> Any:
        value, generation = call(self, message, *arguments)
        return (reply if message.method == "fill_bitmasks" else value), generation

    monkeypatch.setattr(isolated_process.PluginProcess, "call", answered)
    assert rows.run() == [None] and rows.texts == ["ab"], "each row is filled by itself"


def test_a_backend_that_is_lost_again_and_again_is_left_alone(
    plugins: PluginManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = compiler_of(plugins)
    process = process_of(plugins)
    now = 0.0
    monkeypatch.setattr(process, "_clock", lambda: now)
    compiler.compile(GrammarSpec("regex", "a"))
    process._num_failures = MAX_STUCK_THREADS - 1
    with pytest.raises(PluginLoadError, match="exited with status 3"):
        compiler.compile(GrammarSpec("regex", "a~compile exit 0"))
    with pytest.raises(PluginLoadError, match="lost 4 times in a row"):
        compiler.compile(GrammarSpec("regex", "a"))
    assert "structured_output:mine" in refused(plugins)
    now = RETRY_SECONDS
    assert Rows(compiler, "ab").run() == [None]


def test_a_hook_that_raises_names_the_plugin(plugins: PluginManager) -> None:
    with pytest.raises(
        PluginLoadError, match=r"structured_output:broken from .*it cannot be opened"
    ):
        compiler_of(plugins, "broken")
