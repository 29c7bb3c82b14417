"""A parser of Hermes calls, and what may be wrong with one."""

from __future__ import annotations

from mutants.specimen import Mutant, Specimen
from treadle.api.matching import ModelTraits
from treadle.testing.parsers import TOOLS, ToolParserSuite, call, text
from treadle.testing.streams import PROSE
from treadle.testing.tool_calls import MALFORMED, SOUND

MATCH = """
@impl
def treadle_match(kind, key, model):
    if (kind, key) == (KIND, "mine") and model.template_contains("<call>"):
        return Match(100, "the chat template writes <call>")
"""
MATCHED = [ModelTraits(templates={"tool_use": "{{ messages }}<call>"})]
MATCHING = (
    Mutant("test_it_matches_its_models", {"<call>": "<calls>"}),
    Mutant(
        "test_it_leaves_other_models_alone",
        {'model.template_contains("<call>")': "model.templates"},
    ),
    Mutant("test_it_matches_under_its_own_key_only", {'(kind, key) == (KIND, "mine") and ': ""}),
    Mutant("test_its_reason_can_be_shown", {"100": "0"}),
)
SOURCE = f"""
from treadle.api import impl
from treadle_parsing_kit.partial_match import TagFilter
from treadle_parsing_kit.tool_call_parser import TextAroundCalls
from treadle.api.structured_output import GrammarSpec
from treadle.api.matching import Match
from treadle.api.parsers import TextDelta, ToolCallDelta
from treadle_hermes.parser import Hermes as Sound

KIND = "tool_parsers"
TREADLE = {{"tool_parsers": ["mine"]}}


class Mine(Sound):
    pass


@impl
def treadle_tool_parser(name, tokenizer, tools):
    return Mine(tokenizer, tools) if name == "mine" else None

{MATCH}"""


def mine(body: str) -> dict[str, str]:
    """The edits of a parser with these methods."""
    return {"    pass\n": body}


ALIKE = {
    "class Mine(Sound):\n    pass\n": """
class Mine:
    def __init__(self, *given):
        Mine.inner = Sound(*given)

    def __getattr__(self, name):
        return getattr(Mine.inner, name)
"""
}
# Beginnings of methods.
SEEN = """
    all = ""

    def feed(self, text, ids):
        self.all += text
"""
SLOW = f"""{SEEN}
        for _ in range(32):
            sum(char == "<" for char in self.all)
        return super().feed(text, ids)
"""
AGAIN = """
    last = []

    def finish(self):
        self.last = self.last or super().finish()
        return self.last
"""
KEPT = """
    def __init__(self, *given):
        super().__init__(*given)
        self.kept = []

    def finish(self):
        found, self.kept = self.kept + super().finish(), []
        return found

    def feed(self, text, ids):
        self.kept += super().feed(text, ids)
"""
X = '{"x": "some of the arguments", "y": [1, true]}'
ONE = f'<tool_call>\n{{"name": "f", "arguments": {X}}}\n</tool_call>'


class Calls(ToolParserSuite):
    cases = [
        (f"Well.\n{ONE}\n{ONE}", [text("Well.\n"), call(0, "f", X), call(1, "f", X)]),
        (
            '<tool_call>{"name": "g", "arguments": {}}</tool_call> ok',
            [call(0, "g", "{}"), text(" ok")],
        ),
    ]
    malformed = MALFORMED
    block = ("<tool_call>", "\n", "</tool_call>")
    sound = SOUND
    tools = TOOLS
    prose = PROSE[:5]
    lengths = (250, 1000)
    matched = MATCHED


SPECIMENS = (
    Specimen(
        suite=Calls,
        plugin="tool_parsers:mine",
        source=SOURCE,
        mutants=(
            *MATCHING,
            Mutant(  # says the blanks between calls
                "test_cases",
                mine("""
    def __init__(self, *given):
        super().__init__(*given)
        self._text_around = Saying()
""")
                | {
                    "class Mine": """class Saying(TextAroundCalls):
    def emit_text(self, text):
        return [TextDelta(text)] if text else []


class Mine"""
                },
            ),
            Mutant(  # says what may be the beginning of a tag
                "test_any_chunking_gives_the_same",
                mine("""
    def scan(self, text, at, *tags):
        before, tag, end = super().scan(text, at, *tags)
        before, self.pending = before + self.pending, ""
        return before, tag, end
"""),
            ),
            Mutant(  # keeps its state where all others keep theirs
                "test_two_parsers_share_nothing",
                ALIKE,
            ),
            Mutant(  # raises if the output ends in the middle of a key
                "test_every_prefix_can_be_finished",
                mine(
                    SEEN
                    + """
        return super().feed(text, ids)

    def finish(self):
        if self.all == 'Well.\\n<tool_call>\\n{"na':
            raise ValueError("no key")
        return super().finish()
"""
                ),
            ),
            Mutant(  # ends the process there
                "test_every_prefix_can_be_finished",
                mine(
                    SEEN
                    + """
        return super().feed(text, ids)

    def finish(self):
        if self.all == 'Well.\\n<tool_call>\\n{"na':
            raise SystemExit(0)
        return super().finish()
"""
                ),
            ),
            Mutant(  # returns texts where deltas are due, with what a user writes in two scripts
                "test_what_it_returns_can_be_sent",
                mine("""
    def feed(self, text, ids):
        deltas = super().feed(text, ids)
        return [*deltas, text] if text == "\\u200d" else deltas
"""),
            ),
            Mutant(  # numbers calls with floats, which are equal to ints and sent as 0.0
                "test_what_it_returns_can_be_sent",
                mine("""
    def feed(self, text, ids):
        return [
            ToolCallDelta(float(d.index), d.name, d.arguments) if isinstance(d, ToolCallDelta) else d
            for d in super().feed(text, ids)
        ]
"""),
            ),
            Mutant(  # says its end again
                "test_the_end_is_said_once",
                mine(AGAIN),
            ),
            Mutant(  # looks at everything again for each piece
                "test_time_is_linear",
                mine(SLOW),
            ),
            Mutant(  # goes on with the arguments of a call after what broke them
                "test_calls_are_well_formed",
                mine("""
    broke = False

    def feed(self, text, ids):
        reader = self._reader
        found = super().feed(text, ids)
        self.broke = self.broke or bool(reader and reader.begun and reader.failed)
        if not self.broke:
            return found
        return [
            ToolCallDelta(self.calls - 1, None, d.text) if isinstance(d, TextDelta) else d
            for d in found
        ]
"""),
            ),
            Mutant(  # drops what turns out to be no call
                "test_text_is_never_lost",
                mine("""
    def abandon_call(self, at):
        self.call_prefix.clear()
        return super().abandon_call(at)
"""),
                also=frozenset(
                    {"test_a_malformed_call_is_text", "test_a_malformed_call_spares_its_siblings"}
                ),
                why="a malformed call is such a text",
            ),
            Mutant(  # leaves tags that nothing came of
                "test_no_tag_is_text",
                mine("""
    def __init__(self, *given):
        super().__init__(*given)
        self._tag_filter = TagFilter(())
"""),
                also=frozenset({"test_text_is_never_lost", "test_a_malformed_call_is_text"}),
                why="all compare text without tags",
            ),
            Mutant(  # hands on the name before anything is certain
                "test_a_malformed_call_is_text",
                mine("""
    def recover(self, at):
        self._out.append(ToolCallDelta(self.calls, "f", "{"))
        self.calls += 1
        return super().recover(at)
"""),
                also=frozenset({"test_a_malformed_call_spares_its_siblings"}),
                why="a call too many stands among the others",
            ),
            Mutant(  # gives the rest of a block up
                "test_a_malformed_call_spares_its_siblings",
                mine("""
    def recover(self, at):
        return self.abandon_call(at)
"""),
            ),
            Mutant(  # fails at its third call
                "test_each_of_many_calls_is_found",
                mine("""
    def feed(self, text, ids):
        deltas = super().feed(text, ids)
        if any(getattr(delta, "index", 0) == 2 for delta in deltas):
            raise KeyError(2)
        return deltas
"""),
            ),
            Mutant(  # takes any JSON for a call
                "test_prose_holds_no_calls",
                mine(
                    SEEN
                    + """
        return super().feed(text, ids)

    def finish(self):
        found = super().finish()
        if self.all.startswith('{"answer": 42') and self.all.endswith("}"):
            found.append(ToolCallDelta(self.calls, "f", self.all))
            self.all = ""
        return found
"""
                ),
            ),
            Mutant(  # says text when something else comes
                "test_text_streams",
                mine(
                    KEPT
                    + """
        if not self.kept or isinstance(self.kept[-1], TextDelta):
            return []
        found, self.kept = self.kept, []
        return found
"""
                ),
            ),
            Mutant(  # hands on calls when they are complete
                "test_arguments_stream",
                mine(
                    KEPT
                    + """
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
"""
                ),
            ),
            Mutant(  # cannot be asked for any call at all
                "test_a_forced_call_can_be_asked_for",
                mine("""
    def grammar_for_tool_choice(self, choice):
        if choice == "required":
            raise KeyError("required")
        return super().grammar_for_tool_choice(choice)
"""),
            ),
            Mutant(  # forces something that it does not read
                "test_a_forced_call_parses",
                mine("""
    def grammar_for_tool_choice(self, choice):
        made = super().grammar_for_tool_choice(choice)
        return GrammarSpec(made.kind, made.source.replace("<tool_call>", "<toolcall>"))
"""),
            ),
        ),
    ),
)
