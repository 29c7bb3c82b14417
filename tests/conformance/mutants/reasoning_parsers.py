"""A parser of reasoning between two tags, and what may be wrong with one."""

from __future__ import annotations

from mutants.specimen import Mutant, Specimen
from mutants.tool_parsers import AGAIN, ALIKE, KEPT, MATCH, MATCHED, MATCHING, SLOW
from treadle.testing.parsers import ReasoningSuite, reasoning, text
from treadle.testing.streams import PROSE

SOURCE = f"""
from treadle.api import impl
from treadle.api.matching import Match
from treadle.api.parsers import ReasoningDelta, TextDelta
from treadle_parsing_kit.reasoning_tags import TaggedReasoningParser, prompt_reasoning_state

KIND = "reasoning_parsers"
TREADLE = {{"reasoning_parsers": ["mine"]}}
TAGS = ("<think>", "</think>")


class Sound(TaggedReasoningParser):
    def __init__(self, prompt, tokenizer):
        super().__init__(TAGS, prompt_reasoning_state(prompt, TAGS, tokenizer), always=False)


class Mine(Sound):
    pass


@impl
def treadle_reasoning_parser(name, tokenizer, prompt):
    return Mine(prompt, tokenizer) if name == "mine" else None

{MATCH}"""
LONG = "The quick brown fox jumps over the lazy dog. " * 4


def mine(body: str) -> dict[str, str]:
    """The edits of a parser with these methods."""
    return {"    pass\n": body}


class Thoughts(ReasoningSuite):
    cases = [
        ("", "<think>\nhm </think>\n\nyes", [reasoning("hm"), text("yes")]),
        ("<think>", f"{LONG}</think>{LONG}", [reasoning(LONG.rstrip()), text(LONG)]),
    ]
    prose = PROSE[:4]
    lengths = (250, 1000)
    matched = MATCHED


SPECIMENS = (
    Specimen(
        suite=Thoughts,
        plugin="reasoning_parsers:mine",
        source=SOURCE,
        mutants=(
            *MATCHING,
            Mutant(  # begins the answer with a blank
                "test_cases",
                mine("""
    begun = False

    def feed(self, text, ids):
        found = super().feed(text, ids)
        for at, delta in enumerate(found):
            if isinstance(delta, TextDelta) and not self.begun and self._state == "text":
                self.begun = True
                found[at] = TextDelta(f" {delta.text}")
        return found
"""),
            ),
            Mutant(  # says what may be the beginning of a tag
                "test_any_chunking_gives_the_same",
                mine("""
    def feed(self, text, ids):
        found = super().feed(text, ids)
        if self._state == "inside" and self._pending:
            found += self._think(self._pending)
            self._pending = ""
        return found
"""),
            ),
            Mutant(  # keeps its state where all others keep theirs
                "test_two_parsers_share_nothing",
                ALIKE,
            ),
            Mutant(  # raises if the output ends in the middle of a tag
                "test_every_prefix_can_be_finished",
                mine("""
    def finish(self):
        if self._pending == "</thi":
            raise ValueError("half a tag")
        return super().finish()
"""),
            ),
            Mutant(  # hands on half a character
                "test_what_it_returns_can_be_sent",
                mine("""
    def feed(self, text, ids):
        return super().feed(text.replace("👩", "\\ud83d"), ids)
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
            Mutant(  # drops half a tag that turns out to be none
                "test_nothing_is_lost",
                mine("""
    def _think(self, text):
        return super()._think(text.replace("</th~", "~"))
"""),
            ),
            Mutant(  # leaves a tag that nobody opened
                "test_no_tag_is_left",
                {
                    "TAGS, prompt_reasoning_state(prompt, TAGS, tokenizer), always=False": "TAGS, prompt_reasoning_state(prompt, TAGS, tokenizer), always=False, hidden=()"
                },
            ),
            Mutant(  # takes a call for a part of the thought
                "test_a_call_ends_an_open_thought",
                mine("""
    def feed(self, text, ids):
        return [
            ReasoningDelta(d.text) if d.text.startswith("<tool_call>") else d
            for d in super().feed(text, ids)
        ]
"""),
            ),
            Mutant(  # says that it is open for ever
                "test_open_says_where_it_is",
                {
                    "class Mine(Sound):\n    pass\n": """
class Mine:
    in_reasoning = True

    def __init__(self, *given):
        inner = Sound(*given)
        self.feed, self.finish = inner.feed, inner.finish
"""
                },
            ),
            Mutant(  # says everything at the end
                "test_it_streams",
                mine(f"{KEPT}        return []\n"),
            ),
            Mutant(  # names a text that opens nothing
                "test_what_opens_it_opens_it",
                mine("""
    @property
    def opening_tag(self):
        return "<thoughts>" if self._state == "begin" else None
"""),
            ),
        ),
    ),
)
