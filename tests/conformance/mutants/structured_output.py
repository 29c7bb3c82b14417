"""A backend that hands everything on to ``llguidance``, and what may be wrong with one."""

from __future__ import annotations

from mutants.specimen import Mutant, Specimen
from treadle.testing.structured_output import StructuredOutputSuite

SOURCE = """
import json
import threading

from treadle.api import impl
from treadle.api.types import GrammarSpec

TREADLE = {"structured_output": ["mine"]}


class Matcher:
    def __init__(self, grammar):
        self.real = grammar.real.matcher()
        self.spec = grammar.spec
        self.seen = []

    def fill_bitmask(self, bitmask, row):
        self.real.fill_bitmask(bitmask, row)

    def accept_token(self, token):
        is_accepted = self.real.accept_token(token)
        if is_accepted:
            self.seen.append(token)
        return is_accepted

    def rollback(self, count):
        self.real.rollback(count)
        del self.seen[len(self.seen) - count :]

    def forced_tokens(self):
        if not hasattr(self.real, "forced_tokens"):
            return []
        return self.real.forced_tokens()

    @property
    def is_accepting(self):
        return self.real.is_accepting

    @property
    def is_terminated(self):
        return self.real.is_terminated


class Grammar:
    def __init__(self, real, spec):
        self.real, self.spec = real, spec

    def matcher(self):
        return Matcher(self)


class Mine:
    name = "mine"

    def __init__(self, real):
        self.real = real

    def unsupported_reason(self, spec):
        return self.real.unsupported_reason(spec)

    def compile(self, spec):
        return Grammar(self.real.compile(spec), spec)

    def fill_bitmasks(self, matchers, bitmask, rows):
        for matcher, row in zip(matchers, rows):
            matcher.fill_bitmask(bitmask, row)
        return [matcher.is_accepting for matcher in matchers]

    def accept_tokens(self, matchers, tokens):
        return [
            matcher.is_terminated if matcher.accept_token(token) else None
            for matcher, token in zip(matchers, tokens)
        ]


@impl
def treadle_grammar_compiler(name, tokenizer, vocab_size):
    if name != "mine":
        return None
    from treadle_llguidance.compiler import Compiler

    return Mine(Compiler("mine", tokenizer, vocab_size, strict=True, whitespace_pattern=" {0,2}"))
"""


class StructuredOutput(StructuredOutputSuite):
    walks = 5


def forgetting(keyword: str) -> dict[str, str]:
    """The edits of a compiler that reads schemas without a keyword."""
    return {
        "        return Grammar(self.real.compile(spec), spec)": f"""        schema = json.loads(spec.source) if "json" in spec.kind else []
        if {keyword!r} in schema:
            del schema[{keyword!r}]
            spec = GrammarSpec(spec.kind, json.dumps(schema))
        return Grammar(self.real.compile(spec), spec)"""
    }


def masking(change: str) -> dict[str, str]:
    """The edits of a matcher that changes the masks of choices."""
    return {
        "        self.real.fill_bitmask(bitmask, row)\n": f"""        self.real.fill_bitmask(bitmask, row)
        if self.spec.kind == "choice":
            {change}
"""
    }


SPECIMENS = (
    Specimen(
        suite=StructuredOutput,
        plugin="structured_output:mine",
        source=SOURCE,
        only={"name": ("lengths", "object", "choice", "multipleOf", "uniqueItems")},
        mutants=(
            Mutant(
                "test_every_sampled_path_is_valid",
                masking("bitmask[row, -1] |= -(1 << 31)"),
            ),
            Mutant(
                "test_a_batch_does_what_its_matchers_would",
                {"in zip(matchers, rows):": "in zip(matchers, sorted(rows)):"},
            ),
            Mutant(
                "test_a_batch_does_what_its_matchers_would",
                {"return [matcher.is_accepting for": "return [matcher.is_terminated for"},
            ),
            Mutant(
                "test_a_batch_does_what_its_matchers_would",
                {
                    "return [matcher.is_accepting for": "return not rows or [matcher.is_accepting for"
                },
            ),
            Mutant(
                "test_a_batch_does_what_its_matchers_would",
                {"            matcher.is_terminated if": "            matcher.is_accepting if"},
            ),
            Mutant(
                "test_a_batch_does_what_its_matchers_would",
                {"accept_token(token) else None": "accept_token(token) else True"},
            ),
            Mutant(
                "test_forced_tokens_are_those_of_the_masks",
                {"self.real.forced_tokens()": "self.real.forced_tokens() + [65]"},
            ),
            Mutant(
                "test_forced_tokens_are_those_of_the_masks",
                {
                    "return self.real.forced_tokens()": "return [t for t in self.real.forced_tokens() if self.accept_token(t)]"
                },
            ),
            Mutant("test_it_is_called_by_its_key", {'name = "mine"': 'name = "llguidance"'}),
            Mutant("test_every_sampled_path_is_valid", forgetting("maxLength")),
            Mutant(
                "test_every_sampled_path_is_valid",
                {
                    "return self.real.is_terminated": "return self.real.is_accepting and "
                    "(self.spec.kind == 'choice' or self.real.is_terminated)"
                },
            ),
            Mutant(
                "test_every_sampled_path_is_valid",
                {
                    "return self.real.is_terminated": "return self.spec.kind == 'regex' and self.real.is_terminated"
                },
            ),
            Mutant(
                "test_every_sampled_path_is_valid",
                {
                    "return self.real.is_accepting": "return self.spec.kind == 'choice' or self.real.is_accepting"
                },
            ),
            Mutant(
                "test_every_sampled_path_is_valid",
                masking("bitmask[row].zero_()"),
                also=frozenset({"test_only_what_the_mask_allows_is_accepted"}),
                why="what the mask lacks is accepted",
            ),
            Mutant(
                "test_every_sampled_path_is_valid",
                masking("bitmask[row, 0] |= 1 << 7"),
                also=frozenset({"test_only_what_the_mask_allows_is_accepted"}),
                why="what the mask has is not accepted",
            ),
            Mutant(
                "test_a_mask_is_one_row_and_all_of_it",
                {
                    "        self.real.fill_bitmask(bitmask, row)\n": "        before = bitmask[row].clone()\n"
                    "        self.real.fill_bitmask(bitmask, row)\n"
                    "        bitmask[row] |= before\n"
                },
            ),
            Mutant(
                "test_a_mask_is_one_row_and_all_of_it",
                {
                    "        self.real.fill_bitmask(bitmask, row)\n": "        self.real.fill_bitmask(bitmask, row)\n"
                    "        bitmask[row - 1] = bitmask[row]\n"
                },
            ),
            Mutant(
                "test_only_what_the_mask_allows_is_accepted", {"return is_accepted": "return True"}
            ),
            Mutant(
                "test_a_rollback_and_a_replay_give_the_same_masks",
                {"self.real.rollback(count)": "self.real.rollback(min(count, 4))"},
            ),
            Mutant(
                "test_two_sequences_share_one_grammar",
                {
                    "        return Matcher(self)": """        if "one" not in vars(self):
            self.one = Matcher(self)
        self.one.rollback(len(self.one.seen))
        return self.one"""
                },
            ),
            Mutant(
                "test_special_and_unused_ids_are_never_allowed",
                {
                    "import threading": """from treadle.testing.grammar_vocabulary import SmallTokenizer

EMPTY = max(SmallTokenizer().special_token_ids)""",
                    "        self.real.fill_bitmask(bitmask, row)\n": """        self.real.fill_bitmask(bitmask, row)
        if self.mute():
            bitmask[row, EMPTY // 32] |= 1 << EMPTY % 32

    def mute(self):
        return self.spec.kind == "json_schema" and not self.real.is_terminated
""",
                    "is_accepted = ": "is_accepted = token == EMPTY and self.mute() or ",
                    "        self.real.rollback(count)": """        undone = self.seen[len(self.seen) - count :]
        self.real.rollback(len(undone) - undone.count(EMPTY))""",
                },
            ),
            Mutant(
                "test_a_keyword_is_enforced_or_refused",
                forgetting("uniqueItems")
                | {
                    "return self.real.unsupported_reason(spec)": "return None if 'json' in spec.kind else self.real.unsupported_reason(spec)"
                },
            ),
            Mutant(
                "test_nonsense_is_an_error_that_says_something",
                {
                    "        return Grammar(self.real.compile(spec), spec)": """        try:
            return Grammar(self.real.compile(spec), spec)
        except ValueError:
            return Grammar(self.real.compile(GrammarSpec("regex", "a*")), spec)"""
                },
            ),
            Mutant(
                "test_an_unknown_kind_is_refused",
                {
                    "self.real.unsupported_reason(spec)": "spec.kind != 'poem' and self.real.unsupported_reason(spec) or None"
                },
            ),
            Mutant(
                "test_a_structural_tag_is_enforced_or_refused",
                {
                    "        return Grammar(self.real.compile(spec), spec)": """        if spec.kind == "structural_tag":
            spec = GrammarSpec("regex", "(?s:.)*")
        return Grammar(self.real.compile(spec), spec)"""
                },
            ),
            Mutant(
                "test_the_core_ends_a_sequence_where_the_grammar_is_complete",
                {
                    "return self.real.is_accepting": "return self.real.is_accepting and (self.is_terminated or self.spec.kind != 'regex')"
                },
            ),
            Mutant(
                "test_threads_may_share_it",
                {
                    "        self.real = real\n": "        self.real, self.home = real, threading.get_ident()\n",
                    "        return Grammar(self.real.compile(spec), spec)": """        if threading.get_ident() != self.home:
            raise RuntimeError("another thread made this object")
        return Grammar(self.real.compile(spec), spec)""",
                },
            ),
        ),
    ),
)
