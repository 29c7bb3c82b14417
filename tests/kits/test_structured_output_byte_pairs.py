"""Vocabularies of byte pairs: llguidance's own encoder says what the model's tokenizer says."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from treadle_hf_tokenizer.tokenizer import AutoTokenizer

pytest.importorskip("llguidance")

from llguidance import LLTokenizer, TokenizerWrapper

from treadle_structured_output_kit import byte_pairs
from treadle_structured_output_kit.byte_pairs import PATTERNS, PROBES, byte_pair_tokenizer
from treadle_structured_output_kit.llguidance import LLGuidanceCompiler, _Vocabulary

TEXTS = (
    *PROBES,
    '{"kind": "a port of call", "note": "it\'s <|end|> 2026"}',
    "HTTPServer's 12345 //x\n",
)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 5},
        "kind": {"enum": ["a port of call", "<|end|> of a text", "日本"]},
        "size": {"const": 12345678},
    },
    "required": ["first_name", "kind", "size"],
    "additionalProperties": False,
}


def trained(pattern: str, **options: Any) -> AutoTokenizer:
    made = Tokenizer(models.BPE(**options))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<|end|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(TEXTS * 20, trainer)
    return AutoTokenizer(made)


def own(tokenizer: AutoTokenizer) -> tuple[_Vocabulary, LLTokenizer | None]:
    vocabulary = _Vocabulary(tokenizer, tokenizer.vocab_size + 7)
    ids = vocabulary.special_token_ids
    return vocabulary, byte_pair_tokenizer(vocabulary.tokens, ids, vocabulary)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_it_encodes_as_the_models_tokenizer(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by another pattern, if that makes no difference for a vocabulary."""
    model = trained(pattern)
    others = tuple(other for other in PATTERNS if other != pattern)
    for patterns in ((pattern,), others):
        monkeypatch.setattr(byte_pairs, "PATTERNS", patterns)
        vocabulary, tokenizer = own(model)
        assert tokenizer is not None or patterns == others
        if tokenizer is None:
            continue
        rng, blob = random.Random(0), " ".join(TEXTS).replace("<|end|>", "")
        for _ in range(300):
            start = rng.randrange(len(blob))
            text = blob[start : start + rng.randint(1, 40)]
            assert tokenizer.tokenize_str(text) == vocabulary(text), text
        assert {0, 1}.isdisjoint(tokenizer.tokenize_str("a <|end|> of <|pad|>"))


def test_masks_and_forced_ids_are_those_of_the_encoder_in_python() -> None:
    vocabulary, tokenizer = own(trained(PATTERNS[0]))
    assert tokenizer is not None
    size = len(vocabulary.tokens) - 1
    compilers = []
    for each in (
        tokenizer,
        LLTokenizer(TokenizerWrapper(vocabulary), n_vocab=size + 1, eos_token=size),
    ):
        compiler = object.__new__(LLGuidanceCompiler)
        compiler._tokenizer, compiler._vocab_size = each, size
        compilers.append(compiler)
    grammars = [compiler.compile_json_schema(SCHEMA) for compiler in compilers]
    specials = {0, 1, *range(size - 7, size)}
    for seed in range(10):
        rng, matchers = random.Random(seed), [grammar.matcher() for grammar in grammars]
        while not matchers[0].is_terminated:
            masks = torch.zeros((2, size // 32 + 1), dtype=torch.int32)
            for row, matcher in enumerate(matchers):
                matcher.fill_bitmask(masks, row)
            assert torch.equal(masks[0], masks[1])
            assert matchers[0].forced_tokens() == matchers[1].forced_tokens()
            allowed = [i for i in range(size) if int(masks[0, i // 32]) >> i % 32 & 1]
            assert specials.isdisjoint(allowed)
            token = rng.choice(allowed)
            assert all([matcher.accept_token(token) for matcher in matchers])
        text = b"".join(vocabulary.tokens[i] for i in matchers[0].tokens)
        assert json.loads(text)["size"] == SCHEMA["properties"]["size"]["const"]


def test_a_special_token_is_found_by_its_name_and_by_its_number() -> None:
    compiler = LLGuidanceCompiler(trained(PATTERNS[0]), 900)
    for grammar in ("start: /[a-c]/ <|end|>", "start: /[a-c]/ <[0]>"):
        matcher = compiler.compile_grammar(grammar).matcher()
        assert matcher.accept_token(compiler._tokenizer.tokenize_str("a")[0])
        assert matcher.forced_tokens() == [0] and matcher.accept_token(0)


def test_other_vocabularies_are_left_to_python() -> None:
    divided = "'(?:a|b)|\\p{L}{1,2}| ?[^\\s\\p{L}]+|\\s+"
    assert own(trained(divided))[1] is None, "a pattern of no family"
    vocabulary, _ = own(trained(PATTERNS[0]))
    ids = vocabulary.special_token_ids
    twice = [*vocabulary.tokens[:300], b"a", *vocabulary.tokens[301:]]
    assert byte_pair_tokenizer(twice, ids, vocabulary) is None, "two ids of one text"
    lacking = [b"<byte>" if token == b"\x80" else token for token in vocabulary.tokens]
    assert byte_pair_tokenizer(lacking, ids, vocabulary) is None, "no token has this byte"
