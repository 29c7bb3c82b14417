"""llguidance: rows together, and tokenizers that put a space before what they encode, as Llama 2's does."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, trainers
from treadle_hf_tokenizer.tokenizer import AutoTokenizer

from treadle.api.files import ModelFiles

pytest.importorskip("llguidance")

from treadle_structured_output_kit.llguidance import LLGuidanceCompiler

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "kind": {"enum": ["a port of call", "an anchorage"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "kind", "size"],
    "additionalProperties": False,
}
TEXTS = (
    '{"name": "Ada", "kind": "a port of call", "size": 12}',
    '{"name":"Bob","kind":"an anchorage","size":3}',
    "Name: abc, age: 12 years",
)


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> LLGuidanceCompiler:
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    parts = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    made.normalizer = normalizers.Sequence(parts)
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    alphabet = [chr(code) for code in range(33, 127)]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>", "</s>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    made.train_from_iterator(TEXTS * 50, trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = AutoTokenizer.open(ModelFiles(Path(folder), (), {}))
    return LLGuidanceCompiler(tokenizer, tokenizer.vocab_size)


@pytest.mark.parametrize("kind", ["compact", "any blanks", "regex"])
def test_what_a_mask_allows_is_accepted(compiler: LLGuidanceCompiler, kind: str) -> None:
    if kind == "regex":
        grammar = compiler.compile_regex("Name: [a-c]{2}, age: [0-9]{1,2} years")
    else:
        blanks = "" if kind == "compact" else " ?"
        grammar = compiler.compile_json_schema(SCHEMA, whitespace_pattern=blanks)
    size = compiler._vocab_size
    for seed in range(20):
        matcher, rng, ended = grammar.matcher(), random.Random(seed), False
        for _ in range(120):
            for token in matcher.forced_tokens():
                assert matcher.accept_token(token)
            if ended := matcher.is_terminated:
                break
            mask = torch.zeros(1, -(-size // 32), dtype=torch.int32)
            matcher.fill_bitmask(mask, 0)
            allowed = [i for i in range(size) if int(mask[0, i // 32]) >> i % 32 & 1]
            token = rng.choice(allowed)
            assert matcher.accept_token(token), token
        assert ended


@pytest.mark.parametrize("count", [3, 80])
def test_rows_together_get_what_each_would(compiler: LLGuidanceCompiler, count: int) -> None:
    grammar = compiler.compile_json_schema(SCHEMA, whitespace_pattern="")
    together = [grammar.matcher() for _ in range(count)]
    alone = [grammar.matcher() for _ in range(count)]
    rng, words = random.Random(0), compiler._vocab_size // 32 + 1
    for _ in range(5):
        masks = torch.zeros((count, words), dtype=torch.int32)
        expected = torch.zeros((count, words), dtype=torch.int32)
        rows = rng.sample(range(count), count)
        accepting = compiler.fill_bitmasks(together, masks, rows)
        tokens = []
        for matcher, row in zip(alone, rows, strict=True):
            matcher.fill_bitmask(expected, row)
            bits = expected[row].numpy().view("uint8")
            ids = [i for i in range(compiler._vocab_size) if bits[i // 8] >> i % 8 & 1]
            tokens.append(rng.choice(ids))
            assert matcher.accept_token(tokens[-1])
        last = compiler._vocab_size % 32
        masks[:, -1] &= (1 << last) - 1  # the id after the vocabulary is the library's own
        assert torch.equal(masks, expected) and accepting == [False] * count
        assert compiler.accept_tokens(together, tokens) == [m.is_terminated for m in alone]
