"""The suite finds what is wrong with a backend, for each thing that can be."""

from __future__ import annotations

import json
from typing import Any

import pytest

from weft.api.guided import GrammarSpec
from weft.testing.guided import VOCAB, GuidedSuite


class Wrapped:
    """A matcher that does as the real one; mutants change one thing."""

    def __init__(self, real: Any) -> None:
        self.real = real

    def fill(self, bitmask: Any, row: int) -> None:
        self.real.fill(bitmask, row)

    def accept(self, token: int) -> bool:
        return bool(self.real.accept(token))

    def rollback(self, count: int) -> None:
        self.real.rollback(count)

    @property
    def complete(self) -> bool:
        return bool(self.real.complete)

    @property
    def finished(self) -> bool:
        return bool(self.real.finished)


class OneIdMore(Wrapped):
    def fill(self, bitmask: Any, row: int) -> None:
        self.real.fill(bitmask, row)
        bitmask[row, 0] |= 1 << 7


class NeighbourRow(Wrapped):
    def fill(self, bitmask: Any, row: int) -> None:
        self.real.fill(bitmask, row)
        bitmask[row - 1] = bitmask[row]


class OnlyAdds(Wrapped):
    def fill(self, bitmask: Any, row: int) -> None:
        before = bitmask[row].clone()
        self.real.fill(bitmask, row)
        bitmask[row] |= before


class Empty(Wrapped):
    def fill(self, bitmask: Any, row: int) -> None:
        bitmask[row].zero_()


class Special(Wrapped):
    def fill(self, bitmask: Any, row: int) -> None:
        self.real.fill(bitmask, row)
        for token in (*GuidedSuite.tokenizer.special_ids, VOCAB - 1):
            bitmask[row, token // 32] |= (1 << token % 32) - (token % 32 == 31) * (1 << 32)


class AcceptsAll(Wrapped):
    def accept(self, token: int) -> bool:
        self.real.accept(token)
        return True


class RefusesAtRandom(Wrapped):
    count = 0

    def accept(self, token: int) -> bool:
        self.count += 1
        return self.count % 5 != 0 and super().accept(token)


class RollsBackLess(Wrapped):
    def rollback(self, count: int) -> None:
        self.real.rollback(max(0, count - 1))


class NeverFinished(Wrapped):
    finished = False  # type: ignore[assignment]


class FinishedEarly(Wrapped):
    @property
    def finished(self) -> bool:
        return self.complete


class AlwaysComplete(Wrapped):
    complete = True  # type: ignore[assignment]


MATCHERS = [
    OneIdMore, NeighbourRow, OnlyAdds, Empty, Special, AcceptsAll, RefusesAtRandom, RollsBackLess,
    NeverFinished, FinishedEarly, AlwaysComplete,
]  # fmt: skip


class Compiler:
    """The real one, with mutations of matchers, of sharing and of what is enforced."""

    name = "llguidance"

    def __init__(self, mutation: Any) -> None:
        self.real = GuidedSuite.compiler(Real())
        self.mutation = mutation

    def refuses(self, spec: GrammarSpec) -> str | None:
        return None if self.mutation == "forgets" else self.real.refuses(spec)

    def compile(self, spec: GrammarSpec) -> Any:
        if self.mutation == "forgets":
            schema = json.loads(spec.source)
            if isinstance(schema, dict):
                for keyword in ("minimum", "uniqueItems", "maxLength", "maxItems", "not"):
                    schema.pop(keyword, None)
            spec = GrammarSpec(spec.kind, json.dumps(schema))
        grammar = self.real.compile(spec)
        if self.mutation == "shares":
            return Shared(grammar.matcher())
        return Grammar(grammar, self.mutation) if isinstance(self.mutation, type) else grammar


class Grammar:
    def __init__(self, real: Any, mutation: Any) -> None:
        self.real, self.mutation = real, mutation

    def matcher(self) -> Any:
        return self.mutation(self.real.matcher())


class Shared:
    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def matcher(self) -> Any:
        return self._matcher


class Real(GuidedSuite):
    plugin = "guided:llguidance"


NAMES = ("object", "array", "lengths", "choice", "enum", "nested")


def complaints(mutation: Any) -> list[str]:
    """The checks that fail, of a few grammars."""

    class Mutant(GuidedSuite):
        plugin = "guided:llguidance"

        def compiler(self) -> Any:
            return Compiler(mutation)

    suite, found = Mutant(), []
    for check in (
        suite.test_every_sampled_path_is_valid,
        suite.test_only_what_the_mask_allows_is_accepted,
        suite.test_a_rollback_and_a_replay_give_the_same_masks,
        suite.test_two_sequences_share_one_grammar,
        suite.test_special_and_unused_ids_are_never_allowed,
    ):
        for name in NAMES:
            found += failed(check, name)
    for name in ("minimum", "uniqueItems", "maxLength", "maxItems", "not"):
        found += failed(suite.test_a_keyword_is_enforced_or_refused, name)
    found += failed(suite.test_the_core_ends_a_sequence_where_the_grammar_is_complete)
    return found


def failed(check: Any, *arguments: Any) -> list[str]:
    try:
        check(*arguments)
    except Exception:
        return [check.__name__]
    return []


def test_the_real_one_passes() -> None:
    assert complaints(None) == []


@pytest.mark.parametrize("mutation", MATCHERS, ids=lambda m: m.__name__)
def test_a_wrong_matcher_is_found(mutation: type) -> None:
    assert complaints(mutation)


def test_a_shared_state_is_found() -> None:
    assert complaints("shares")


def test_forgotten_keywords_are_found() -> None:
    found = complaints("forgets")
    assert found.count("test_a_keyword_is_enforced_or_refused") == 5
