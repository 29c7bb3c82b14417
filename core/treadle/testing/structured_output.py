"""The conformance suite of structured output backends.

::

    class TestMine(PluginSuite, StructuredOutputSuite):
        plugin = "structured_output:mine"

Grammars of the corpus are compiled for a small vocabulary that has everything which makes masks
hard: tokens of several characters, tokens that cross the parts of a JSON text, halves of
characters, special and unused ids. Random walks through the masks must end in valid texts only.
What a backend cannot enforce, it refuses; ``ignored`` holds the keywords that libraries forget.
"""

from __future__ import annotations

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from treadle.api.kinds import STRUCTURED_OUTPUT
from treadle.api.structured_output import (
    CompiledGrammar,
    GrammarCompiler,
    GrammarMatcher,
    GrammarSpec,
    SupportsForcedTokens,
    SupportsGrammarBatches,
)
from treadle.structured_output.checker import CPU_SECONDS
from treadle.testing.grammar_corpus import VALID, ignored, specs, structural_tag, tagged
from treadle.testing.grammar_vocabulary import SmallTokenizer
from treadle.testing.plugin import PluginTest

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ("RandomWalk", "StructuredOutputSuite", "allowed_ids", "ignored", "specs")

VOCAB = 373  # its last word has bits of no id
WORDS = -(-VOCAB // 32)
STEPS = 400


def allowed_ids(matcher: GrammarMatcher, vocab_size: int = VOCAB) -> list[int]:
    """Return the ids that a matcher's bitmask allows."""
    import torch

    mask = torch.zeros((1, -(-vocab_size // 32)), dtype=torch.int32)
    matcher.fill_bitmask(mask, 0)
    return _bits(mask[0])


def _bits(line: Tensor) -> list[int]:
    import numpy as np

    octets = line.numpy().view(np.uint8)
    return [int(i) for i in np.flatnonzero(np.unpackbits(octets, bitorder="little"))]


class RandomWalk:
    """A random path through a grammar: its tokens, and whether it is finished.

    ``fault`` describes a mistake of the matcher, ``""`` if there was none.
    """

    def __init__(self, matcher: GrammarMatcher, seed: int, tokenizer: SmallTokenizer) -> None:
        self.tokens: list[int] = []
        self.masks: list[list[int]] = []
        self.is_finished = False
        self.fault = ""
        rng = random.Random(seed)
        stop_probability = rng.random()
        closing_ids = {t for t in range(VOCAB) if tokenizer.token_bytes(t)[:1] in CLOSING}

        def fail(fault: str) -> None:
            self.fault = f"{fault} after {tokenizer.decode(self.tokens)!r}"

        while len(self.tokens) < STEPS:
            allowed = allowed_ids(matcher)
            is_accepting, finished = matcher.is_accepting, matcher.is_terminated
            if finished != (is_accepting and not allowed):
                return fail(f"finished is {finished}")
            if not is_accepting and not allowed:
                return fail("a dead end")
            if allowed and allowed[-1] >= VOCAB:
                return fail(f"{allowed[-1]} is no id, and allowed")
            if finished or (is_accepting and rng.random() < stop_probability):
                self.is_finished = True
                return
            closing = [token for token in allowed if token in closing_ids]
            token = rng.choice(
                closing if closing and rng.random() < stop_probability / 2 else allowed
            )
            if not matcher.accept_token(token):
                return fail(f"{token} is in the mask and not accepted")
            self.tokens.append(token)
            self.masks.append(allowed)


CLOSING = (b'"', b"]", b"}", b"\\")


class StructuredOutputSuite(PluginTest):
    """Subclass it with ``plugin``; its name must begin with ``Test``."""

    walks: ClassVar[int] = 12
    """Random walks through each grammar."""
    tokenizer: ClassVar[SmallTokenizer] = SmallTokenizer()

    def compiler(self) -> GrammarCompiler:
        """The compiler under test. Override it to test one that is not installed."""
        compiler: GrammarCompiler = _compiler(type(self))  # type: ignore[arg-type]
        return compiler

    def grammar(self, name: str) -> CompiledGrammar:
        """Compiled once for all tests of a class, as the core shares it among requests."""
        grammar: CompiledGrammar | str = _grammar(type(self), name)  # type: ignore[arg-type]
        if isinstance(grammar, str):
            pytest.skip(grammar)
        return grammar

    def compiled(self, spec: GrammarSpec) -> CompiledGrammar | str:
        """Return the compiled grammar, or the refusal."""
        compiler = self.compiler()
        reason = compiler.unsupported_reason(spec)
        if reason is not None:
            assert reason.strip(), "a refusal that says nothing"
            return reason
        start_time = time.process_time()
        grammar = compiler.compile(spec)
        seconds = time.process_time() - start_time
        # The process that compiles it first would be killed.
        return (
            grammar
            if seconds <= CPU_SECONDS
            else f"takes {seconds:.1f} s, more than the core allows"
        )

    def simple(self, spec: GrammarSpec) -> CompiledGrammar:
        grammar = self.compiled(spec)
        if isinstance(grammar, str):
            pytest.skip(grammar)
        return grammar

    def test_it_is_called_by_its_key(self) -> None:
        assert self.compiler().name == self.key

    @pytest.mark.parametrize("name", list(specs))
    def test_every_sampled_path_is_valid(self, name: str) -> None:
        grammar = self.grammar(name)
        num_ended = 0
        for seed in range(self.walks):
            walk = RandomWalk(grammar.matcher(), seed, self.tokenizer)
            assert not walk.fault, walk.fault
            if walk.is_finished:
                num_ended += 1
                VALID[specs[name].kind](specs[name], self.tokenizer.decode(walk.tokens))
        assert num_ended, "no path came to an end"

    @pytest.mark.parametrize("name", list(specs))
    def test_a_mask_is_one_row_and_all_of_it(self, name: str) -> None:
        import torch

        matcher = self.grammar(name).matcher()
        rng = random.Random(name)
        for _ in range(3):
            allowed = allowed_ids(matcher)
            mask = torch.full((3, WORDS), 0x55555555, dtype=torch.int32)
            matcher.fill_bitmask(mask, 1)
            assert (mask[[0, 2]] == 0x55555555).all(), "fill wrote into another row"
            assert _bits(mask[1]) == allowed, "fill leaves bits as they were"
            if not allowed:
                return
            matcher.accept_token(rng.choice(allowed))

    @pytest.mark.parametrize("name", list(specs))
    def test_only_what_the_mask_allows_is_accepted(self, name: str) -> None:
        matcher = self.grammar(name).matcher()
        rng = random.Random(name)
        for _ in range(8):
            allowed = allowed_ids(matcher)
            for token in rng.sample(range(VOCAB), 48):
                state = (matcher.is_accepting, matcher.is_terminated)
                if token in allowed:
                    assert matcher.accept_token(token), f"{token} is in the mask and not accepted"
                    matcher.rollback(1)
                elif matcher.accept_token(token):
                    # Of several spellings of one text, one is enough in the mask.
                    text = self._text(token)
                    spelled = [self._text(other) for other in allowed]
                    is_spelled = any(s.startswith(text) or text.startswith(s) for s in spelled if s)
                    assert is_spelled, f"{token} is accepted and not in the mask"
                    matcher.rollback(1)
                assert (matcher.is_accepting, matcher.is_terminated) == state
            assert allowed_ids(matcher) == allowed, "a refusal or an undone token left a trace"
            if not allowed:
                return
            assert matcher.accept_token(rng.choice(allowed))

    @pytest.mark.parametrize("name", list(specs))
    def test_a_rollback_and_a_replay_give_the_same_masks(self, name: str) -> None:
        grammar = self.grammar(name)
        for seed in range(3):
            matcher = grammar.matcher()
            walk = RandomWalk(matcher, seed, self.tokenizer)
            matcher.rollback(0)
            for count in (1, 2, 5, 16):
                if count > len(walk.tokens):
                    break
                matcher.rollback(count)
                for token, mask in zip(walk.tokens[-count:], walk.masks[-count:], strict=True):
                    assert allowed_ids(matcher) == mask
                    assert matcher.accept_token(token)
                if walk.is_finished:
                    assert matcher.is_accepting

    @pytest.mark.parametrize("name", list(specs))
    def test_two_sequences_share_one_grammar(self, name: str) -> None:
        grammar = self.grammar(name)
        walks = [RandomWalk(grammar.matcher(), seed, self.tokenizer) for seed in (1, 2)]
        matchers = [grammar.matcher(), grammar.matcher()]
        for step in range(max(len(walk.tokens) for walk in walks)):
            for walk, matcher in zip(walks, matchers, strict=True):
                if step < len(walk.tokens):
                    assert allowed_ids(matcher) == walk.masks[step], "the other one's state is seen"
                    assert matcher.accept_token(walk.tokens[step])

    @pytest.mark.parametrize("name", list(specs))
    def test_forced_tokens_are_those_of_the_masks(self, name: str) -> None:
        matcher = self.grammar(name).matcher()
        if not isinstance(matcher, SupportsForcedTokens):
            pytest.skip("it knows of none")
        rng = random.Random(name)
        for _ in range(STEPS // 8):
            allowed = allowed_ids(matcher)
            forced = matcher.forced_tokens()
            assert allowed_ids(matcher) == allowed, "to ask for them changes the masks"
            for token in forced:
                assert not matcher.is_accepting, f"{token} is forced where the output may end"
                assert allowed_ids(matcher) == [token], f"{token} is not the only one allowed"
                assert matcher.accept_token(token), f"{token} is forced and not accepted"
            matcher.rollback(len(forced))
            if not allowed:
                return
            assert matcher.accept_token(rng.choice(allowed))

    def test_a_batch_does_what_its_matchers_would(self) -> None:
        """Each row with a twin that advances by itself; some get a token that is not allowed."""
        import torch

        compiler = self.compiler()
        if not isinstance(compiler, SupportsGrammarBatches):
            pytest.skip("it advances one sequence at a time")
        compiled = [self.compiled(specs[name]) for name in ("choice", "object", "lengths", "regex")]
        grammars = [grammar for grammar in compiled * 3 if not isinstance(grammar, str)]
        pairs = [(grammar.matcher(), grammar.matcher()) for grammar in grammars]
        rng = random.Random(0)
        while pairs:
            bitmask = torch.full((len(pairs) + 1, VOCAB // 32 + 1), 0x55555555, dtype=torch.int32)
            matchers, rows = [matcher for matcher, _ in pairs], list(range(len(pairs), 0, -1))
            is_accepting = compiler.fill_bitmasks(matchers, bitmask, rows)
            masks = [allowed_ids(twin) for _, twin in pairs]
            assert is_accepting == [twin.is_accepting for _, twin in pairs]
            written = [[i for i in _bits(bitmask[row]) if i < VOCAB] for row in rows]
            assert written == masks
            assert (bitmask[0] == 0x55555555).all(), "it wrote into another row"
            tokens = [
                rng.choice(mask) if rng.random() < 0.95 else self.tokenizer.eos_token_id
                for mask in masks
            ]
            results = compiler.accept_tokens(matchers, tokens)
            for (matcher, twin), token, result in zip(pairs, tokens, results, strict=True):
                expected = twin.is_terminated if twin.accept_token(token) else None
                assert result == expected, f"{result} for {token}, {expected} by itself"
                if result is None:  # the core asks that matcher, and ends its sequence only
                    assert not matcher.accept_token(token)
            pairs = [pair for pair, result in zip(pairs, results, strict=True) if result is False]
            bitmask.fill_(0x55555555)
            assert compiler.fill_bitmasks([], bitmask, []) == [], "there are no matchers"
            assert (bitmask == 0x55555555).all(), "nobody has asked for a mask"

    @pytest.mark.parametrize("name", list(specs))
    def test_special_and_unused_ids_are_never_allowed(self, name: str) -> None:
        grammar = self.grammar(name)
        for seed in range(3):
            for mask in RandomWalk(grammar.matcher(), seed, self.tokenizer).masks:
                assert not self.tokenizer.special_token_ids & set(mask)
                assert max(mask) < self.tokenizer.vocab_size, "an id without bytes is allowed"

    @pytest.mark.parametrize("name", list(ignored))
    def test_a_keyword_is_enforced_or_refused(self, name: str) -> None:
        schema, invalid_value = ignored[name]
        spec = GrammarSpec("json_schema", json.dumps(schema))
        compiler = self.compiler()
        reason = compiler.unsupported_reason(spec)
        if reason is not None:
            assert reason.strip()
            return
        try:
            matcher = compiler.compile(spec).matcher()
        except Exception as error:
            assert str(error), "an error that says nothing"
            return
        data = json.dumps(invalid_value, ensure_ascii=False).encode()
        is_accepted = all(matcher.accept_token(self.tokenizer.of_byte(byte)) for byte in data)
        assert not (is_accepted and matcher.is_accepting), f"{invalid_value!r} passes {schema!r}"

    @pytest.mark.parametrize("kind", ["json_schema", "regex", "ebnf"])
    def test_nonsense_is_an_error_that_says_something(self, kind: Any) -> None:
        source = {"json_schema": '{"type": "foo"}', "regex": "(", "ebnf": "root ::= ("}[kind]
        spec = GrammarSpec(kind, source)
        compiler = self.compiler()
        if compiler.unsupported_reason(spec) is not None:
            return
        with pytest.raises(Exception, match=r"\w"):
            compiler.compile(spec)

    def test_an_unknown_kind_is_refused(self) -> None:
        kind: Any = "poem"
        assert self.compiler().unsupported_reason(GrammarSpec(kind, "{}"))

    @pytest.mark.parametrize("text", list(tagged))
    def test_a_structural_tag_is_enforced_or_refused(self, text: str) -> None:
        spec = GrammarSpec("structural_tag", json.dumps(structural_tag))
        compiler = self.compiler()
        if compiler.unsupported_reason(spec) is not None:
            pytest.skip("it has no structural tags")
        matcher = compiler.compile(spec).matcher()
        ids = [self.tokenizer.of_byte(byte) for byte in text.encode()]
        accepted = all(map(matcher.accept_token, ids)) and matcher.is_accepting
        assert accepted == tagged[text]

    def test_the_core_ends_a_sequence_where_the_grammar_is_complete(self) -> None:
        """The core handles stop ids: any id may be one, and it is allowed only at the end."""
        import torch

        from treadle.structured_output import StructuredOutputState

        matcher = self.simple(GrammarSpec("regex", "ab{0,2}")).matcher()
        state = StructuredOutputState(matcher)
        stops = (self.tokenizer.eos_token_id, VOCAB - 1)
        for char, ends in (("a", False), ("b", True), ("b", True)):
            assert not state.has_ended
            mask = torch.zeros((1, WORDS), dtype=torch.int32)
            state.fill_bitmask(mask, 0, stops)
            allowed = _bits(mask[0])
            assert {token in allowed for token in stops} == {ends} and state.error is None
            assert {self._text(t)[:1] for t in allowed if t not in stops} == {char.encode()}
            state.accept_token(self.tokenizer.of_byte(ord(char)))
        assert state.has_ended, "nothing may follow, and the sequence goes on"

    def test_threads_may_share_it(self) -> None:
        """Grammars are compiled in a thread pool and used by the engine's thread."""
        compiler = self.compiler()
        small_specs = [specs[name] for name in ("enum", "lengths", "object", "regex", "choice")]
        supported_specs = [
            spec for spec in small_specs if compiler.unsupported_reason(spec) is None
        ] * 2

        def walk(grammar: CompiledGrammar) -> list[int]:
            return RandomWalk(grammar.matcher(), 5, self.tokenizer).tokens

        grammars = [compiler.compile(spec) for spec in supported_specs]
        expected = [walk(grammar) for grammar in grammars]
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(walk, grammars)) == expected
            assert [
                walk(compiled) for compiled in pool.map(compiler.compile, supported_specs)
            ] == expected

    def _text(self, token: int) -> bytes:
        return self.tokenizer.token_bytes(token) if token < self.tokenizer.vocab_size else b""


@cache
def _compiler(suite: type[StructuredOutputSuite]) -> Any:
    subject = suite()
    return subject.plugin_manager().create(
        STRUCTURED_OUTPUT, subject.key, tokenizer=suite.tokenizer, vocab_size=VOCAB
    )


@cache
def _grammar(suite: type[StructuredOutputSuite], name: str) -> Any:
    return suite().compiled(specs[name])
