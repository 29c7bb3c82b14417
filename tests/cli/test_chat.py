"""``treadle chat``: the conversation, the pipe, and a real terminal with Ctrl-C."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable

import pytest

from treadle_cli.conversation import Conversation

SMALL = ("--kv-cache-memory-bytes", "10000000", "--cpu-threads", "1")


# -- the conversation ----------------------------------------------------------------------


def test_messages():
    talk = Conversation("Be brief.")
    talk.add_question("a")
    talk.add_answer("b")
    assert talk.add_question("c") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]


def test_reset_keeps_the_system_message():
    talk = Conversation("Be brief.")
    talk.add_question("a")
    assert talk.command("/reset") == "(forgotten)"
    assert talk.messages() == [{"role": "system", "content": "Be brief."}]


def test_system_can_be_set_and_taken_back():
    talk = Conversation()
    assert talk.command("/system Be kind.") == "(system message: Be kind.)"
    assert talk.add_question("a")[0] == {"role": "system", "content": "Be kind."}
    assert talk.command("/system") == "(system message: none)"
    assert talk.messages() == [{"role": "user", "content": "a"}]


@pytest.mark.parametrize("word", ["/exit", "/quit"])
def test_exit(word):
    talk = Conversation()
    assert talk.command(word) is None and talk.is_finished


def test_what_looks_like_a_command():
    talk = Conversation()
    assert "there is no command /rest" in (talk.command("/rest") or "")
    assert talk.command("/usr/bin/env is what?") is None, "a path is a question"
    assert talk.command("hello /exit") is None and not talk.is_finished


def test_a_question_that_failed_is_taken_back():
    talk = Conversation()
    talk.add_question("a")
    talk.drop_question()
    talk.drop_question()
    assert talk.messages() == []


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
        stdin="Hi\n\nMore\n/reset\nHi\n/exit\nnever\n",
    )
    assert (result.code, result.err) == (0, "(forgotten)\n")
    assert result.out == f"{first}\n{second}\n{first}\n"


def test_a_turn_that_does_not_fit_ends_a_pipe(treadle, checkpoint):
    result = treadle("chat", checkpoint, *SMALL, "--max-model-len", "32", stdin="x" * 100 + "\n")
    assert result.code == 2 and result.err.startswith("treadle: ") and result.err.count("\n") == 1


# -- a terminal ----------------------------------------------------------------------------


class Terminal:
    """A process on a pseudo-terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "treadle_cli", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={**os.environ, "TERM": "dumb"},
        )
        os.close(slave)
        self.screen = ""

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def wait_for(self, text: str, seconds: float = 60.0) -> str:
        """Read until ``text`` appears; what was read since the last call."""
        until = time.monotonic() + seconds
        while text not in self.screen:
            ready, _, _ = select.select([self.master], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise AssertionError(
                    f"{text!r} did not come in {seconds} s; there was {self.screen!r}"
                )
            self.screen += os.read(self.master, 65536).decode(errors="replace")
        before, _, self.screen = self.screen.partition(text)
        return before + text

    def comes(self, text: str, seconds: float) -> bool:
        try:
            return bool(self.wait_for(text, seconds))
        except AssertionError:
            return False

    def ends(self, seconds: float) -> bool:
        try:
            return self.process.wait(seconds) is not None
        except subprocess.TimeoutExpired:
            return False

    def repeat(self, key: str, condition: Callable[[], bool], times: int = 60) -> None:
        """Type as a person does, again if nothing happens: what is typed between the prompt and
        the editor's first look at the keyboard is lost, and the signal of Ctrl-C drops the line."""
        for _ in range(times):
            self.type(key)
            if condition():
                return
        raise AssertionError(f"{key!r} had no effect; there was {self.screen!r}")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.master)


def test_ctrl_c_stops_the_answer_and_not_the_program(checkpoint):
    terminal = Terminal(
        *("chat", checkpoint, *SMALL, "--temperature", "0", "--ignore-eos", "--max-tokens", "200")
    )
    try:
        terminal.wait_for("> ")
        terminal.type("Hello\r")
        terminal.wait_for("Hello\r\n")
        first = os.read(terminal.master, 1)
        assert first
        terminal.type("\x03")
        assert "tokens" in terminal.wait_for("stopped)")
        terminal.wait_for("> ")
        terminal.repeat("\x03", lambda: terminal.comes("/exit or Ctrl-D leaves", 1.0))
        terminal.type("\x03\x03\x03")
        terminal.repeat("/exit\r", lambda: terminal.ends(1.0))
        assert terminal.process.returncode == 0
    finally:
        terminal.close()


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
