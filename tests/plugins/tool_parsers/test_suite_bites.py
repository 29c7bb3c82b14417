"""Each check of ``ToolParserSuite`` bites: for each there is a parser that fails it, and no other."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from weft_hermes.parser import Hermes

from weft.api.callparser import Prose
from weft.api.guided import GrammarSpec
from weft.api.parsers import Delta, TextDelta, ToolCallDelta
from weft.testing.matching import Matching
from weft.testing.parsers import TOOLS, ToolParserSuite, call, text
from weft.testing.streams import PROSE, Letters

FILE = Path(__file__).parents[2] / "conformance" / "checks.py"
spec = importlib.util.spec_from_file_location("checks_of_suites", FILE)
assert spec is not None and spec.loader is not None
checks: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(checks)

X = '{"x": "some of the arguments", "y": [1, true]}'
ONE = f'<tool_call>\n{{"name": "f", "arguments": {X}}}\n</tool_call>'


class Suite(ToolParserSuite):
    plugin = "tool_parsers:hermes"
    cases = [
        (f"Well.\n{ONE}\n{ONE}", [text("Well.\n"), call(0, "f", X), call(1, "f", X)]),
        ('<tool_call>{"name": "g"}</tool_call> ok', [call(0, "g", "{}"), text(" ok")]),
    ]
    tools = TOOLS[-1:]
    prose = PROSE[:5]
    lengths = (250, 1000)
    kind: type = Hermes

    def open(self) -> Any:
        return self.kind(Letters(), self.tools)


class Saying(Prose):
    def say(self, text: str) -> list[Delta]:
        return [TextDelta(text)] if text else []


class Blanks(Hermes):
    """Says the blanks between calls."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._prose = Saying()


class Impatient(Hermes):
    """Says what may be the beginning of a tag."""

    def find(self, text: str, at: int, mark: str) -> int:
        found = text.find(mark, at)
        self.say(text[at : found if found >= 0 else len(text)])
        return found if found < 0 else found + len(mark)


class Shared:
    """Keeps its state where all others keep theirs."""

    inner: Hermes

    def __init__(self, *given: Any) -> None:
        Shared.inner = Hermes(*given)

    def feed(self, text: str, ids: Sequence[int]) -> list[Delta]:
        return self.inner.feed(text, ids)

    def finish(self) -> list[Delta]:
        return self.inner.finish()

    def grammar(self, choice: Any) -> Any:
        return self.inner.grammar(choice)


class Abrupt(Hermes):
    """Raises if the output ends in the middle of a key."""

    all = ""

    def feed(self, text: str, ids: Sequence[int]) -> list[Delta]:
        self.all += text
        return super().feed(text, ids)

    def finish(self) -> list[Delta]:
        if self.all == 'Well.\n<tool_call>\n{"na':
            raise ValueError("no key")
        return super().finish()


class Repeating(Hermes):
    """Says its end again."""

    last: list[Delta] = []

    def finish(self) -> list[Delta]:
        self.last = self.last or super().finish()
        return self.last


class Slow(Hermes):
    """Looks at everything again for each piece."""

    all = ""

    def feed(self, text: str, ids: Sequence[int]) -> list[Delta]:
        self.all += text
        for _ in range(8):
            sum(char == "<" for char in self.all)
        return super().feed(text, ids)


class Breaking(Hermes):
    """Goes on with the arguments of a call after what broke them."""

    broke = False

    def feed(self, text: str, ids: Sequence[int]) -> list[Delta]:
        reader: Any = self._reader
        found = super().feed(text, ids)
        self.broke = self.broke or bool(reader and reader.begun and reader.failed)
        if not self.broke:
            return found
        return [ToolCallDelta(self.calls - 1, None, d.text) if isinstance(d, TextDelta) else d
                for d in found]  # fmt: skip


class Swallowing(Hermes):
    """Drops what turns out to be no call."""

    def give_up(self, at: int) -> int:
        self.lead.clear()
        return super().give_up(at)


class Eager(Hermes):
    """Takes any JSON for a call."""

    all = ""

    def feed(self, text: str, ids: Sequence[int]) -> list[Delta]:
        self.all += text
        return super().feed(text, ids)

    def finish(self) -> list[Delta]:
        found = super().finish()
        if self.all.startswith('{"answer": 42') and self.all.endswith("}"):
            found.append(ToolCallDelta(self.calls, "f", self.all))
            self.all = ""
        return found


class Late(Hermes):
    """Says text when something else comes."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.kept: list[Delta] = []

    def feed(self, text: str, ids: Sequence[int]) -> list[Delta]:
        self.kept += super().feed(text, ids)
        if all(isinstance(delta, TextDelta) for delta in self.kept):
            return []
        found, self.kept = self.kept, []
        return found

    def finish(self) -> list[Delta]:
        found, self.kept = self.kept + super().finish(), []
        return found


class Whole(Hermes):
    """Hands on calls when they are complete."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.kept: list[Delta] = []

    def feed(self, text: str, ids: Sequence[int]) -> list[Delta]:
        self.kept += super().feed(text, ids)
        if self._reader is not None:
            return []
        found, self.kept = self.kept, []
        first = [d for d in found if isinstance(d, ToolCallDelta)]
        if len({d.index for d in first}) != 1:
            return found
        name = next((d.name for d in first if d.name), None)
        one = ToolCallDelta(first[0].index, name, "".join(d.arguments for d in first))
        at = found.index(first[0])
        behind = [d for d in found[at:] if not isinstance(d, ToolCallDelta)]
        return [*found[:at], one, *behind]

    def finish(self) -> list[Delta]:
        found, self.kept = self.kept + super().finish(), []
        return found


class Unable(Hermes):
    """Cannot be asked for any call at all."""

    def grammar(self, choice: Any) -> GrammarSpec:
        if choice == "required":
            raise KeyError("required")
        return super().grammar(choice)


class Misspelt(Hermes):
    """Forces something that it does not read."""

    def grammar(self, choice: Any) -> GrammarSpec:
        made = super().grammar(choice)
        return GrammarSpec(made.kind, made.source.replace("<tool_call>", "<toolcall>"))


MUTANTS: dict[type, set[str]] = {
    Hermes: set(),
    Blanks: {"test_cases"},
    Impatient: {"test_any_chunking_gives_the_same"},
    Shared: {"test_two_parsers_share_nothing"},
    Abrupt: {"test_every_prefix_can_be_finished"},
    Repeating: {"test_the_end_is_said_once"},
    Slow: {"test_time_is_linear"},
    Breaking: {"test_calls_are_well_formed"},
    Swallowing: {"test_text_is_never_lost"},
    Eager: {"test_prose_holds_no_calls"},
    Late: {"test_text_streams"},
    Whole: {"test_arguments_stream"},
    Unable: {"test_a_forced_call_can_be_asked_for"},
    Misspelt: {"test_a_forced_call_parses"},
}


@pytest.mark.parametrize("kind", MUTANTS, ids=lambda kind: kind.__name__)
def test_the_check_bites(kind: type, tmp_path: Path) -> None:
    assert set(checks.failing(type("Mutant", (Suite,), {"kind": kind}), tmp_path)) == MUTANTS[kind]


def test_every_check_has_a_mutant() -> None:
    """Those of ``Matching`` have theirs in tests/conformance/test_matching_bites.py."""
    names = set(dir(ToolParserSuite)) - set(dir(Matching))
    there = {name for name in names if name.startswith("test_")}
    assert set().union(*MUTANTS.values()) == there
