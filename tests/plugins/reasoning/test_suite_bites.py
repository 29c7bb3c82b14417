"""Each check of ``ReasoningSuite`` bites: for each there is a parser that fails it, and no other."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from weft.api.parsers import Delta, TextDelta
from weft.api.thinking import Thinking, opened
from weft.testing.matching import Matching
from weft.testing.parsers import ReasoningSuite, reasoning, text
from weft.testing.streams import PROSE, Letters

FILE = Path(__file__).parents[2] / "conformance" / "checks.py"
spec = importlib.util.spec_from_file_location("checks_of_suites", FILE)
assert spec is not None and spec.loader is not None
checks: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(checks)

TAGS = ("<think>", "</think>")
LONG = "The quick brown fox jumps over the lazy dog. " * 4


class Sound(Thinking):
    def __init__(self, prompt: str) -> None:
        super().__init__(TAGS, opened(prompt, TAGS, Letters()), always=False)


class Suite(ReasoningSuite):
    plugin = "reasoning:qwen3"
    cases = [
        ("", "<think>\nhm </think>\n\nyes", [reasoning("hm"), text("yes")]),
        ("<think>", f"{LONG}</think>{LONG}", [reasoning(LONG.rstrip()), text(LONG)]),
    ]
    prose = PROSE[:4]
    lengths = (250, 1000)
    kind: type = Sound

    def open(self, prompt: str) -> Any:
        return self.kind(prompt)


class Blanks(Sound):
    """Begins the answer with a blank."""

    begun = False

    def feed(self, text: str, ids: Sequence[int]) -> list[Delta]:
        found = super().feed(text, ids)
        for at, delta in enumerate(found):
            if isinstance(delta, TextDelta) and not self.begun and self._state == "text":
                self.begun = True
                found[at] = TextDelta(f" {delta.text}")
        return found


class Impatient(Sound):
    """Says what may be the beginning of a tag."""

    def feed(self, text: str, ids: Sequence[int]) -> list[Delta]:
        found = super().feed(text, ids)
        if self._state == "inside" and self._carry:
            found += self._think(self._carry)
            self._carry = ""
        return found


class Shared:
    """Keeps its state where all others keep theirs."""

    inner: Sound

    def __init__(self, prompt: str) -> None:
        Shared.inner = Sound(prompt)

    @property
    def open(self) -> bool:
        return self.inner.open

    def feed(self, text: str, ids: Sequence[int]) -> list[Delta]:
        return self.inner.feed(text, ids)

    def finish(self) -> list[Delta]:
        return self.inner.finish()


class Abrupt(Sound):
    """Raises if the output ends in the middle of a tag."""

    def finish(self) -> list[Delta]:
        if self._carry == "</thi":
            raise ValueError("half a tag")
        return super().finish()


class Repeating(Sound):
    """Says its end again."""

    last: list[Delta] = []

    def finish(self) -> list[Delta]:
        self.last = self.last or super().finish()
        return self.last


class Slow(Sound):
    """Looks at everything again for each piece."""

    all = ""

    def feed(self, text: str, ids: Sequence[int]) -> list[Delta]:
        self.all += text
        for _ in range(8):
            sum(char == "<" for char in self.all)
        return super().feed(text, ids)


class Swallowing(Sound):
    """Drops half a tag that turns out to be none."""

    def _think(self, text: str) -> list[Delta]:
        return super()._think(text.replace("</th~", "~"))


class Late(Sound):
    """Says everything at the end."""

    def __init__(self, prompt: str) -> None:
        super().__init__(prompt)
        self.kept: list[Delta] = []

    def feed(self, text: str, ids: Sequence[int]) -> list[Delta]:
        self.kept += super().feed(text, ids)
        return []

    def finish(self) -> list[Delta]:
        found, self.kept = self.kept + super().finish(), []
        return found


class Held:
    """Delegates, and says that it is open for ever."""

    open = True

    def __init__(self, prompt: str) -> None:
        inner = Sound(prompt)
        self.feed, self.finish = inner.feed, inner.finish


class Boasting(Sound):
    """Names a text that opens nothing."""

    @property
    def opener(self) -> str | None:
        return "<thoughts>" if self._state == "begin" else None


MUTANTS: dict[type, set[str]] = {
    Sound: set(),
    Blanks: {"test_cases"},
    Impatient: {"test_any_chunking_gives_the_same"},
    Shared: {"test_two_parsers_share_nothing"},
    Abrupt: {"test_every_prefix_can_be_finished"},
    Repeating: {"test_the_end_is_said_once"},
    Slow: {"test_time_is_linear"},
    Swallowing: {"test_nothing_is_lost"},
    Held: {"test_open_says_where_it_is"},
    Late: {"test_it_streams"},
    Boasting: {"test_what_opens_it_opens_it"},
}


@pytest.mark.parametrize("kind", MUTANTS, ids=lambda kind: kind.__name__)
def test_the_check_bites(kind: type, tmp_path: Path) -> None:
    assert set(checks.failing(type("Mutant", (Suite,), {"kind": kind}), tmp_path)) == MUTANTS[kind]


def test_every_check_has_a_mutant() -> None:
    """Those of ``Matching`` have theirs in tests/conformance/test_matching_bites.py."""
    names = set(dir(ReasoningSuite)) - set(dir(Matching))
    there = {name for name in names if name.startswith("test_")}
    assert set().union(*MUTANTS.values()) == there
