"""A sequence whose matcher fails spoils its grammar for no other sequence."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from treadle.api.files import ModelFiles, Tokenizer
from treadle.api.kinds import STRUCTURED_OUTPUT
from treadle.api.structured_output import (
    GrammarCompiler,
    GrammarMatcher,
    GrammarSpec,
    SupportsGrammarBatches,
)
from treadle.plugins import PluginManager
from treadle.structured_output import StructuredOutputState
from treadle.structured_output.batch import GrammarBatch
from treadle.testing.grammar_corpus import ignored, schemas
from treadle.testing.grammar_vocabulary import SmallTokenizer
from treadle.testing.structured_output import allowed_ids

BACKENDS = [
    "llguidance",
    "lm-format-enforcer",
    "outlines",
    pytest.param(
        "xgrammar",
        marks=pytest.mark.skipif(find_spec("xgrammar") is None, reason="xgrammar is not installed"),
    ),
]
SMALL = SmallTokenizer()
# More automaton states than the library allows, after some dozens of tokens of a real vocabulary.
EXPLOSIVE = r"(.*[a-m].{500}b.*[n-z].{300}c)"


@cache
def compiler(backend: str) -> GrammarCompiler:
    return PluginManager().create(
        STRUCTURED_OUTPUT, backend, tokenizer=SMALL, vocab_size=SMALL.vocab_size
    )


@cache
def demo() -> tuple[Tokenizer, GrammarCompiler]:
    import treadle_demo
    from treadle_hf_tokenizer.tokenizer import AutoTokenizer

    tokenizer = AutoTokenizer.open(ModelFiles(Path(treadle_demo.__file__).parent / "model", (), {}))
    return tokenizer, PluginManager().create(
        STRUCTURED_OUTPUT, "llguidance", tokenizer=tokenizer, vocab_size=tokenizer.vocab_size
    )


def walk(matcher: GrammarMatcher, seed: int, vocab_size: int, steps: int) -> Iterator[int]:
    rng = random.Random(seed)
    for _ in range(steps):
        allowed = allowed_ids(matcher, vocab_size)
        if not allowed:
            return
        token = rng.choice(allowed)
        assert matcher.accept_token(token)
        yield token


def test_a_limit_of_the_library_is_reached_by_one_sequence_alone() -> None:
    tokenizer, llguidance = demo()
    grammar = llguidance.compile(GrammarSpec("regex", EXPLOSIVE))
    fine = walk(grammar.matcher(), 1, tokenizer.vocab_size, 20)
    begun = [next(fine) for _ in range(10)]
    with pytest.raises(ValueError, match=r"llguidance has reached a limit .* too many expressions"):
        list(walk(grammar.matcher(), 0, tokenizer.vocab_size, 300))
    later = list(walk(grammar.matcher(), 1, tokenizer.vocab_size, 20))
    assert later == [*begun, *fine], "one that had begun, and one that comes later"


def test_a_limit_that_is_reached_in_a_batch_ends_one_sequence() -> None:
    tokenizer, llguidance = demo()
    assert isinstance(llguidance, SupportsGrammarBatches)
    grammars = [llguidance.compile(GrammarSpec("regex", p)) for p in (EXPLOSIVE, "[a-z ]*")]
    states = [StructuredOutputState(g.matcher(), batches=llguidance) for g in grammars]
    bitmask = torch.zeros((2, tokenizer.vocab_size // 32 + 1), dtype=torch.int32)
    rng = random.Random(0)
    for _ in range(300):
        rows = [(i, s, (), ()) for i, s in enumerate(states) if s.error is None]
        GrammarBatch(rows).fill_bitmasks(bitmask, tokenizer.vocab_size)
        octets = bitmask.numpy().view(np.uint8)
        bits = np.unpackbits(octets, axis=1, bitorder="little")[:, : tokenizer.vocab_size]
        choices = [(row, np.flatnonzero(b)) for row, b in zip(rows, bits, strict=False)]
        rows = [row for row, _ in choices if row[1].error is None]
        tokens = [int(rng.choice(ids)) for row, ids in choices if row[1].error is None]
        GrammarBatch(rows).accept_tokens(tokens)
    assert "llguidance has reached a limit of its own" in str(states[0].error)
    assert states[1].error is None and not states[1].has_ended


def test_what_others_have_written_does_not_count() -> None:
    """The automaton is shared, and full of states of all of them at some time."""
    tokenizer, llguidance = demo()
    grammar = llguidance.compile(GrammarSpec("regex", "(.*a.{300}b|.*c.{50}d)"))
    for seed in range(4):
        assert len(list(walk(grammar.matcher(), seed, tokenizer.vocab_size, 200))) == 200


class Broken:
    """What a library has for a sequence, which fails at one of the calls."""

    def __init__(self, real: Any, call_index: int) -> None:
        self._real, self._remaining = real, call_index

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._real, name)
        if not callable(value):
            return value

        def call(*arguments: Any, **named: Any) -> Any:
            self._remaining -= 1
            if self._remaining < 0:
                raise RuntimeError(f"odd in {name}")
            return value(*arguments, **named)

        return call


PARTS = {
    "llguidance": "_library",
    "lm-format-enforcer": "_reader",
    "outlines": "_guide",
    "xgrammar": "library",
}


def end_by_fault(backend: str, matcher: Any, call_index: int, tokens: list[int]) -> bool:
    """Let a sequence write ``tokens`` while a call of its library fails; return whether it did."""
    part = PARTS[backend]
    broken = next(m for m in (matcher, getattr(matcher, "_matcher", None)) if hasattr(m, part))
    setattr(broken, part, Broken(getattr(broken, part), call_index))
    dropped: list[int] = []
    state = StructuredOutputState(matcher, on_failure=lambda: dropped.append(1))
    mask = torch.zeros(1, -(-SMALL.vocab_size // 32), dtype=torch.int32)
    for token in tokens:
        state.fill_bitmask(mask, 0, (), ())
        if not state.error:
            state.accept_token(token)
        if state.has_ended:
            break
    if state.error:
        assert "odd in" in state.error and state.error_param == "structured_outputs"
        assert dropped == [1], "the grammar is compiled afresh"
    return state.error is not None


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_fault_at_any_call_of_a_library_leaves_the_grammar_to_others(backend: str) -> None:
    schema = schemas["object"]
    grammar = compiler(backend).compile(GrammarSpec("json_schema", json.dumps(schema)))
    expected = list(walk(grammar.matcher(), 5, SMALL.vocab_size, 12))
    failed = 0
    for call_index in range(24):
        failed += end_by_fault(backend, grammar.matcher(), call_index, expected)
        assert list(walk(grammar.matcher(), 5, SMALL.vocab_size, 12)) == expected
    assert failed >= 12


@pytest.mark.parametrize("count", [30, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_walks_over_many_schemas_outlive_faults(backend: str, count: int) -> None:
    """Every second sequence of a grammar that is kept fails somewhere; the others write what they
    write in a grammar of their own."""
    rng = random.Random(count)
    every_schema = schemas | {f"{name}, forgotten": schema for name, (schema, _) in ignored.items()}
    compile = compiler(backend).compile
    specs = (GrammarSpec("json_schema", json.dumps(schema)) for schema in every_schema.values())
    usable = [spec for spec in specs if compiler(backend).unsupported_reason(spec) is None]
    kept = {}
    for spec in rng.sample(usable, min(count, len(usable))):
        with suppress(ValueError, RuntimeError):  # what a library does not support, it says here
            kept[spec.source] = compile(spec)
    usable = [spec for spec in usable if spec.source in kept]
    failed = 0
    for seed in range(count):
        spec = usable[seed % len(usable)]
        expected = list(walk(compile(spec).matcher(), seed, SMALL.vocab_size, 12))
        matcher = kept[spec.source].matcher()
        failed += end_by_fault(backend, matcher, rng.randrange(12), expected)
        assert list(walk(kept[spec.source].matcher(), seed, SMALL.vocab_size, 12)) == expected, spec
    assert failed > count // 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_sequences_of_one_grammar_do_not_see_each_other(backend: str) -> None:
    """Two that take turns, with rollbacks, write what each writes alone."""
    steps = 12
    names = random.Random(7).sample(sorted(schemas), 8)
    for name in names:
        spec = GrammarSpec("json_schema", json.dumps(schemas[name]))
        if compiler(backend).unsupported_reason(spec) is not None:
            continue
        grammar = compiler(backend).compile(spec)
        alone = [list(walk(grammar.matcher(), seed, SMALL.vocab_size, steps)) for seed in (1, 2)]
        again = compiler(backend).compile(spec)
        first, second = again.matcher(), again.matcher()
        turns = [walk(first, 1, SMALL.vocab_size, steps), walk(second, 2, SMALL.vocab_size, steps)]
        together: list[list[int]] = [[], []]
        for _ in range(steps):
            for index, turn in enumerate(turns):
                together[index] += [token for token in [next(turn, None)] if token is not None]
        assert together == alone, name
        first.rollback(len(together[0]))
        assert list(walk(first, 1, SMALL.vocab_size, steps)) == alone[0], name
