"""What a person sees of ``treadle chat``: wrapping, a whole session on a narrow terminal, history."""

from __future__ import annotations

import random
import stat
import threading
import unicodedata

import pyte
import pytest
from fake_server import fake_server
from pseudo_terminal import Terminal

from treadle_cli.chat.history import MAX_ENTRIES, FileHistory
from treadle_cli.terminal.wrapping import CLOSING, Wrapper

WIDE = "日本語の文章はどこでも改行できます。でも句読点は行頭に来ません。"


def shown(pieces: list[str], columns: int, rows: int = 200) -> list[str]:
    """What a terminal shows of a text that comes in pieces; newlines return the cursor."""
    screen = pyte.Screen(columns, rows)
    stream, wrapper = pyte.Stream(screen), Wrapper(lambda: columns)
    for piece in pieces:
        stream.feed(wrapper.feed(piece).replace("\n", "\r\n"))
    lines = [line.rstrip() for line in screen.display]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def columns_of(line: str) -> int:
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in line)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("aaa bbb ccc ddd eee", ["aaa bbb ccc", "ddd eee"]),
        ("aaa bbb ccccccc", ["aaa bbb", "ccccccc"]),
        ("x " + "y" * 30, ["x", "y" * 14, "y" * 14, "yy"]),
        ("  indented\n\n\ttab", ["  indented", "", "        tab"]),
        ("日本語日本語日本語", ["日本語日本語日", "本語"]),
        ("日本語日本語日、本", ["日本語日本語", "日、本"]),
        ("aaa bbb ccc dd\nx", ["aaa bbb ccc dd", "x"]),
        ("aaa bbb ccc dd x", ["aaa bbb ccc dd", "x"]),
    ],
)
def test_lines_break_between_words(text, lines):
    assert shown([text], 15) == shown(list(text), 15) == lines


@pytest.mark.parametrize("seed", range(40))
def test_text_keeps_its_words_and_stays_inside(seed):
    draw = random.Random(seed)
    atoms = ["a", "word", "0123456789", "日本", "é", "x" * 40, "本。", "-", "e\u0301"]
    text = " ".join(draw.choices(atoms, k=draw.randint(0, 20)))
    cuts = sorted(draw.choices(range(len(text) + 1), k=8))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    columns = draw.randint(12, 60)
    lines = shown(pieces, columns, rows=60)
    assert all(columns_of(line) < columns for line in lines)
    content = unicodedata.normalize("NFC", text).replace(" ", "")
    assert "".join(lines).replace(" ", "") == content
    assert not any(line[0] in CLOSING for line in lines if line)


def test_a_session_on_a_narrow_terminal(tmp_path):
    """Reasoning, a spinner, wide text, a pasted block, typing ahead, Ctrl-C, completion, history."""
    wait_1, wait_2, never = threading.Event(), threading.Event(), threading.Event()
    call = {"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}
    with fake_server() as server:
        server.answers = [
            [wait_1, {"reasoning": "I think. " * 6}, {"content": f"\n\n{WIDE}"}],
            [wait_2, {"reasoning": "secret"}, {"content": "folded"}],
            [{"tool_calls": [call]}],
            [{"content": "sunny"}],
            [{"content": "half"}, never],
        ]
        chat = ("chat", "--url", server.url)
        state = {"XDG_STATE_HOME": str(tmp_path)}
        with Terminal(*chat, columns=40, **state) as terminal:
            terminal.wait_for(terminal.is_at_prompt)
            terminal.paste("a pasted\n/quit\nblock")
            terminal.wait_for("block")
            terminal.type("\r")
            terminal.wait_for("waiting")
            wait_1.set()
            terminal.wait_for(terminal.is_at_prompt)
            assert "waiting" not in terminal.text
            answer = terminal.lines[terminal.lines.index(". block") + 1 : -1]
            assert answer == [
                "I think. I think. I think. I think. I",
                "think. I think.",
                "",
                "日本語の文章はどこでも改行できます。で",
                "も句読点は行頭に来ません。",
            ]
            terminal.type("/reas\t")
            terminal.wait_for(lambda: terminal.lines[-1].startswith("> /reasoning"))
            terminal.type(" fold\r")
            terminal.wait_for("(reasoning: fold)")
            terminal.wait_for(terminal.is_at_prompt)
            terminal.type("b\r")
            terminal.wait_for("waiting")
            terminal.type("typed ahead\r")
            wait_2.set()
            terminal.wait_for("what does f return?")
            assert "secret" not in terminal.text and "unfolds" in terminal.text
            terminal.wait_for(lambda: terminal.lines[-1] == "=")
            terminal.type("5\r")
            terminal.wait_for("sunny")
            terminal.wait_for(terminal.is_at_prompt)
            terminal.type("c\r")
            terminal.wait_for("half")
            terminal.type("\x03")
            terminal.wait_for("stopped)")
            assert server.left.wait(60), "the server sees that nobody reads"
            terminal.wait_for(terminal.is_at_prompt)
            terminal.type("\x04")
            assert terminal.ends() == 0
        assert [m["content"] for m in server.bodies[0]["messages"]] == ["a pasted\n/quit\nblock"]
        assert server.bodies[2]["messages"][-1]["content"] == "typed ahead"
        with Terminal(*chat, **state) as terminal:
            terminal.wait_for(terminal.is_at_prompt)
            terminal.type("\x1b[A")
            terminal.wait_for("> c")
            terminal.type("\x03\x04")
            assert terminal.ends() == 0


# -- history -------------------------------------------------------------------------------


def test_history_is_private_and_kept(tmp_path):
    file = tmp_path / "state" / "h.jsonl"
    FileHistory(file).store_string("one\ntwo")
    FileHistory(file).store_string(" a secret, with a space before it")
    FileHistory(file).store_string("three")
    assert list(FileHistory(file).load_history_strings()) == ["three", "one\ntwo"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_history_is_bounded(tmp_path):
    file = tmp_path / "h.jsonl"
    file.write_text("".join(f'"{i}"\n' for i in range(2 * MAX_ENTRIES + 1)))
    entries = list(FileHistory(file).load_history_strings())
    assert len(entries) == MAX_ENTRIES and entries[0] == str(2 * MAX_ENTRIES)
    assert len(file.read_text().splitlines()) == MAX_ENTRIES
    FileHistory(file).store_string("x" * 10**6)
    assert len(file.read_text()) < 10**5


def test_a_history_that_cannot_be_used_costs_nothing_else(tmp_path):
    (tmp_path / "h").write_bytes(b'\xff\n{"a": 1}\n"fine"\n')
    assert list(FileHistory(tmp_path / "h").load_history_strings()) == ["fine"]
    (tmp_path / "link").symlink_to(tmp_path / "other")
    FileHistory(tmp_path / "link").store_string("x")
    assert not (tmp_path / "other").exists(), "a link is not followed"
    FileHistory(tmp_path).store_string("x")
    assert list(FileHistory(tmp_path).load_history_strings()) == []
