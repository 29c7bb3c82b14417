"""What reaches the terminal of a model's output."""

from __future__ import annotations

import io

import pytest

from treadle_cli.terminal.screen import Screen, visible


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain\n\ttext", "plain\n\ttext"),
        ("\x1b]0;title\x07", "␛]0;title␇"),
        ("\x1b[2J", "␛[2J"),
        ("a\rb", "a␍b"),
        ("\x7f\x9b31m", "\ufffd\ufffd31m"),
        ("日本 😀 é \ufffd", "日本 😀 é \ufffd"),
        ("👩\u200d👩", "👩\u200d👩"),
        ("\u00a0\u3000", "\u00a0\u3000"),
    ],
)
def test_control_characters_are_shown_and_not_obeyed(text, expected):
    assert visible(text) == expected


def test_a_pipe_gets_the_text_as_it_is():
    pipe, tty = io.StringIO(), Tty()
    Screen(pipe, io.StringIO()).text("\x1b[1m")
    Screen(tty, io.StringIO()).text("\x1b[1m")
    assert (pipe.getvalue(), tty.getvalue()) == ("\x1b[1m", "␛[1m")


def test_remarks_are_dim_on_a_terminal_only():
    pipe, tty = io.StringIO(), Tty()
    Screen(io.StringIO(), pipe).note("x")
    Screen(io.StringIO(), tty).note("x")
    assert (pipe.getvalue(), tty.getvalue()) == ("x\n", "\x1b[2mx\x1b[0m\n")


def test_only_a_terminal_says_what_a_start_waits_for():
    terminal, pipe = Tty(), io.StringIO()
    for err in (terminal, pipe):
        Screen(err=err).wait_for("demo:treadle-demo")
    assert "loading demo:treadle-demo" in terminal.getvalue() and pipe.getvalue() == ""
