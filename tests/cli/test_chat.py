"""``treadle chat``: messages, commands and parameters, the pipe, and an engine on a terminal."""

from __future__ import annotations

import json
import os
import signal
import stat

import pytest
from fake_server import fake_server
from pseudo_terminal import Terminal

from treadle.api.sampling_params import SamplingParams
from treadle.errors import ConfigError, RequestError
from treadle.outputs import ToolCall
from treadle_cli.chat.blocks import is_open, joined_lines, plain_text
from treadle_cli.chat.conversation import Conversation
from treadle_cli.chat.settings import NAMES, Settings
from treadle_cli.chat.slash import find_command, help_text

SMALL = ("--kv-cache-memory-bytes", "10000000", "--cpu-threads", "1")


# -- messages ------------------------------------------------------------------------------


def test_messages():
    talk = Conversation("Be brief.")
    talk.add_question("a")
    talk.add_answer("b", "thought")
    assert talk.add_question("c") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "thought"},
        {"role": "user", "content": "c"},
    ]


def test_undo_takes_back_the_question_and_all_that_followed():
    talk = Conversation()
    talk.add_question("a")
    talk.add_answer("b")
    talk.add_question("c")
    talk.add_answer("", calls=[ToolCall(index=0, id="x", name="f", arguments="{}")])
    talk.add_result("x", "1")
    talk.add_answer("d")
    assert talk.undo() == "c" and [m["role"] for m in talk.turns] == ["user", "assistant"]
    assert talk.undo() == "a" and talk.undo() is None


def test_what_was_saved_is_loaded(tmp_path):
    talk, file = Conversation("Be kind."), tmp_path / "chat.json"
    talk.add_question("日本")
    talk.add_answer("b", "t", [ToolCall(index=0, id="x", name="f", arguments="{}")])
    talk.add_result("x", "1")
    talk.save(file, "m", {"temperature": 0.5}, replace=False)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and os.listdir(tmp_path) == ["chat.json"]
    other = Conversation()
    chat = other.load(file)
    assert other.messages() == talk.messages()
    assert (chat.model, chat.sampling) == ("m", {"temperature": 0.5})


def test_a_file_is_replaced_only_on_purpose(tmp_path):
    file = tmp_path / "chat.json"
    file.write_text("precious")
    with pytest.raises(ConfigError, match="exists; choose another name, or /save! "):
        Conversation().save(file, "m", {}, replace=False)
    assert file.read_text() == "precious"
    Conversation().save(file, "m", {}, replace=True)
    assert json.loads(file.read_text())["messages"] == []


def test_messages_of_another_program_are_loaded(tmp_path):
    (tmp_path / "a.json").write_text('[{"role": "user", "content": "Hi", "name": "Ann"}]')
    talk = Conversation("gone")
    talk.load(tmp_path / "a.json")
    assert talk.messages() == [{"role": "user", "content": "Hi", "name": "Ann"}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        ("{", "is not a conversation: Input data was truncated"),
        ('{"messages": [{"role": "king"}]}', "is not a conversation: Invalid enum value 'king'"),
        ('[{"content": "x"}]', "is not a conversation: Object missing required field `role`"),
        ('[{"role": "system", "content": [{}]}]', "the system message is not text"),
        ("\xff", "is not a conversation"),
    ],
)
def test_a_file_that_is_no_conversation_changes_nothing(tmp_path, content, message):
    file = tmp_path / "chat.json"
    if content is not None:
        file.write_text(content, encoding="latin-1")
    talk = Conversation("s")
    talk.add_question("a")
    with pytest.raises(ConfigError, match=message):
        talk.load(file)
    assert talk.messages()[0] == {"role": "system", "content": "s"} and len(talk.turns) == 1


# -- parameters ----------------------------------------------------------------------------


def test_a_parameter_is_changed_shown_and_taken_back():
    settings = Settings(SamplingParams(temperature=0.2, max_tokens=None), {"top_k": 5})
    assert settings.set("temperature", "0.5") == "temperature 0.5 [0 … 100]"
    assert settings.set("temperature", "") == "temperature 0.5 [0 … 100]"
    assert settings.set("stop", "42") == 'stop ["42"]'
    assert settings.set("min-tokens", "3") == "min_tokens 3"
    params = settings.params()
    assert (params.temperature, params.top_k, params.stop, params.n) == (0.5, 5, ["42"], 1)
    assert settings.set("temperature", "default") == "temperature 0.2 (default) [0 … 100]"
    assert settings.changes == {"top_k": 5, "stop": ["42"], "min_tokens": 3}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("temperature", "hot"),
        ("temperature", "-1"),
        ("top_p", "0"),
        ("seed", "1.5"),
        ("n", "2"),
        ("heat", "1"),
        ("stop", '[""]'),
        ("logit_bias", "[1]"),
        ("max_tokens", "0"),
    ],
)
def test_a_wrong_parameter_is_refused_and_changes_nothing(name, text):
    settings = Settings(None, {"top_k": 5})
    with pytest.raises(RequestError, match=name.replace("heat", "there is no parameter 'heat'")):
        settings.set(name, text)
    assert settings.changes == {"top_k": 5}


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_can_be_shown(name):
    assert Settings(None, {}).set(name, "").startswith(f"{name} the server's default")
    assert "(default)" in Settings(SamplingParams(), {}).line(name)


# -- blocks and commands -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "messages"),
    [
        ("a\n\nb\n", ["a", "b"]),
        ('"""\na\n\n  b\n"""\nc', ["a\n\n  b", "c"]),
        ('"""one line"""', ["one line"]),
        ('/system """a\nb"""\n', ["/system a\nb"]),
        ("a\\\nb\n", ["a\nb"]),
        ('what is """\nb', ['what is """', "b"]),
        ('"""\nnever closed', ['"""\nnever closed']),
    ],
)
def test_blocks(typed, messages):
    assert list(joined_lines(typed.splitlines(keepends=True))) == messages


def test_an_open_block():
    assert is_open('"""') and is_open('/system """a') and not is_open('"""a"""')
    assert not is_open('a """') and plain_text('"""a "quoted" b"""') == 'a "quoted" b'


def test_what_looks_like_a_command():
    with pytest.raises(RequestError, match="there is no command /rest; /help"):
        find_command("/rest")
    for question in ("/usr/bin/env is what?", "hello /exit", "/", "/wat\nis a line of a paste"):
        assert find_command(question) is None
    command, argument = find_command("/set  top_k 3 ")
    assert (command.name, argument) == ("/set", "top_k 3")
    assert find_command("/exit")[0].name == "/quit"


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_help_fits(width):
    assert max(map(len, help_text(width).splitlines())) < max(width, 28)


# -- a pipe --------------------------------------------------------------------------------


def test_every_line_of_a_pipe_is_a_turn(treadle, checkpoint):
    """The second answer knows the first turn; after /reset it is the first answer again."""
    from treadle import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=6)
    messages = [{"role": "user", "content": "Hi"}]
    with LLM(model=checkpoint, kv_cache_memory_bytes=10_000_000, cpu_threads=1) as llm:
        first = llm.chat(messages, params, use_tqdm=False)[0].outputs[0].text
        messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "More"}]
        second = llm.chat(messages, params, use_tqdm=False)[0].outputs[0].text
    result = treadle(
        *("chat", checkpoint, *SMALL, "--temperature", "0", "--max-tokens", "6"),
        stdin="Hi\n\nMore\n/clear\nHi\n/quit\nnever\n",
    )
    assert (result.code, result.err) == (0, "(forgotten)\n")
    assert result.out == f"{first}\n{second}\n{first}\n"


def test_commands_of_a_pipe(treadle, tmp_path):
    """A conversation that was saved is continued, with its parameters, on a server."""
    with fake_server() as server:
        server.answers = [[{"content": "One"}, {"content": "."}], [{"content": "Two."}]]
        chat = ("chat", "--url", server.url, "--api-key", "k")
        first = treadle(*chat, stdin="/system S\n/set top_k 5\na\n/save c.json\n/save c.json\n")
        assert first.code == 0 and first.out == "One.\n", first.err
        second = treadle(*chat, "--load", "c.json", stdin="b\n/undo\n/retry\n/model other\n")
        assert second.code == 0 and second.out == "Two.\nTwo.\n", second.err
        assert "(took back: b)" in second.err and "(now other)" in second.err
    body = server.bodies[1]
    assert [m["content"] for m in body["messages"]] == ["S", "a", "One.", "b"]
    assert (body["model"], body["top_k"], body["stream"]) == ("tiny", 5, True)
    assert "temperature" not in body, "the server's own default"
    assert [m["content"] for m in server.bodies[2]["messages"]] == ["S", "a"]
    assert set(server.keys) == {"Bearer k"}


def test_a_pipe_gets_the_answer_alone(treadle):
    """Reasoning is hidden and nothing moves a cursor, unless it is asked for."""
    with fake_server() as server:
        server.answers = [
            [{"reasoning": "hm"}, {"content": "\n\n"}, {"content": "a " * 60}] for _ in range(2)
        ]
        assert treadle("chat", "--url", server.url, stdin="x\n").out == "a " * 60 + "\n"
        shown = treadle("chat", "--url", server.url, "--reasoning", "show", stdin="x\n")
        assert shown.out == "hm\n\n" + "a " * 60 + "\n"


def test_a_thought_has_a_budget(treadle):
    """Here, and on a server, which gets the field; ``/set`` changes it."""
    chat = ("chat", *SMALL, "--temperature", "0", "--system", "Think before you answer.")
    asked, shown = "What is 12 plus 30?\n", ("--reasoning", "show")
    thought, _, answer = treadle(*chat, *shown, stdin=asked).out.partition("\n\n")
    cut = treadle(*chat, *shown, "--thinking-token-budget", "5", stdin=asked)
    beginning = cut.out.split("\n\n")[0]
    assert thought.startswith(beginning) and 0 < len(beginning) < len(thought)
    assert cut.code == 0 and answer
    none = treadle(*chat, *shown, stdin=f"/set thinking_token_budget 0\n{asked}")
    # What the model says without a thought depends on how a machine rounds.
    assert none.code == 0 and none.out.strip() and not none.out.startswith(thought[:10])
    with fake_server() as server:
        server.answers = [[{"content": "One."}]]
        treadle("chat", "--url", server.url, "--thinking-token-budget", "7", stdin="x\n")
    assert server.bodies[0]["thinking_token_budget"] == 7


def test_a_budget_that_cannot_be_kept_is_one_line(treadle, checkpoint):
    for budget, message in (
        ("5", "thinking_token_budget needs a reasoning parser, and none matches this model"),
        ("-1", "thinking_token_budget is -1"),
    ):
        result = treadle("chat", checkpoint, *SMALL, "--thinking-token-budget", budget, stdin="x\n")
        assert (result.code, result.out) == (2, "")
        assert message in result.err and result.err.count("\n") == 1


def test_the_next_line_of_a_pipe_is_what_a_tool_returns(treadle, tmp_path):
    (tmp_path / "tools.json").write_text('[{"type": "function", "function": {"name": "f"}}]')
    piece = {"index": 0, "id": "c1", "function": {"name": "f", "arguments": '{"a"'}}
    rest = {"index": 0, "function": {"arguments": ": 1}"}}
    with fake_server() as server:
        server.answers = [
            [{"tool_calls": [piece]}, {"tool_calls": [rest], "finish_reason": "tool_calls"}],
            [{"content": "It is 5."}],
        ]
        chat = ("chat", "--url", server.url, "--tools", "tools.json")
        result = treadle(*chat, stdin="x\n5\n")
    assert (result.code, result.out) == (0, '→ f({"a": 1})\nIt is 5.\n')
    call, returned = server.bodies[1]["messages"][1:]
    assert call["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert returned == {"role": "tool", "tool_call_id": "c1", "content": "5"}


def test_a_turn_that_does_not_fit_ends_a_pipe(treadle, checkpoint):
    result = treadle("chat", checkpoint, *SMALL, "--max-model-len", "32", stdin="x" * 100 + "\n")
    assert result.code == 2 and result.err.startswith("treadle: ") and result.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "http://127.0.0.1:1"], "http://127.0.0.1:1/v1 cannot be reached: "),
        (["--url", "ftp://x"], "the URL is 'ftp://x'; write http://HOST:PORT"),
        (["--url", "http://u:p@h"], "the URL has a user"),
        (["--url", "URL", "--max-num-seqs", "3"], "--max-num-seqs is of an engine, and --url"),
        (["third", "--url", "URL"], "has no model 'third'; it has tiny, other"),
        (["--url", "URL", "--tools", "none.json"], "--tools none.json cannot be read"),
        (["--url", "URL", "--temperature", "-1"], "temperature is -1.0"),
        (["--url", "URL", "--load", "none.json"], "none.json cannot be read"),
        (["--url", "URL", "--api-key", "a\nb"], "the header 'Authorization' holds characters"),
    ],
)
def test_a_wrong_start_is_one_line(treadle, arguments, message):
    with fake_server() as server:
        arguments = [server.url if a == "URL" else a for a in arguments]
        result = treadle("chat", *arguments, stdin="x\n")
    assert result.code in (1, 2) and result.out == ""
    assert message in result.err and result.err.count("\n") == 1


# -- an engine on a terminal ---------------------------------------------------------------


def test_ctrl_c_stops_the_answer_and_not_the_program(checkpoint):
    """The line of a prompt that Ctrl-C drops is gone; Ctrl-D then ends the chat."""
    flags = ("--temperature", "0", "--ignore-eos", "--max-tokens", "200", "--no-history")
    with Terminal("chat", checkpoint, *SMALL, *flags) as terminal:
        terminal.wait_for(terminal.is_at_prompt)
        terminal.type("Hello\r")
        terminal.wait_for(lambda: "> Hello" in terminal.lines and terminal.lines[-1] != "> Hello")
        terminal.type("\x03")
        terminal.wait_for("stopped)")
        terminal.wait_for(terminal.is_at_prompt)
        terminal.type("half a line")
        terminal.wait_for("half a line")
        terminal.type("\x03")
        terminal.wait_for("/quit or Ctrl-D leaves")
        terminal.wait_for(terminal.is_at_prompt)
        terminal.type("\x04")
        assert terminal.ends() == 0


def test_an_interrupt_is_a_mark_first_and_an_exception_then():
    from treadle_cli.terminal import Interrupt

    before = signal.getsignal(signal.SIGINT)
    with Interrupt(grace_seconds=60.0) as interrupt:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert interrupt.is_interrupted
    with Interrupt(grace_seconds=0.0) as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert interrupt.is_interrupted
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
