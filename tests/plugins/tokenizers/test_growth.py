"""A tokenizer that multiplies text: refused when it is opened, or before the text is touched."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, processors
from treadle_hf_tokenizer.growth import MAX_TEXT, text_growth
from treadle_hf_tokenizer.tokenizer import AutoTokenizer

from treadle.api.kinds import TOKENIZERS
from treadle.config import PluginConfig
from treadle.errors import CheckpointError, PluginLoadError, RequestError
from treadle.plugins import PluginManager


def tokenizer(model: Any = None, **parts: Any) -> Tokenizer:
    backend = Tokenizer(model or models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    for name, part in parts.items():
        setattr(backend, name, part)
    return backend


def charsmap(replacement: str) -> normalizers.Precompiled:
    """The rules of a SentencePiece model: an empty trie, and one text that its entries name."""
    trie = bytes(1024)
    return normalizers.Precompiled(
        len(trie).to_bytes(4, "little") + trie + replacement.encode() + b"\0"
    )


@pytest.mark.parametrize(
    ("backend", "problem"),
    [
        (tokenizer(normalizer=charsmap("x" * 65)), "normalizer can make 65 characters of one"),
        (
            tokenizer(normalizer=normalizers.Replace(Regex("a*"), "x" * 64)),
            "normalizer can make 65 characters of one",
        ),
        (
            tokenizer(normalizer=normalizers.Replace("", "x" * 64)),
            "normalizer can make 65 characters of one",
        ),
        (
            tokenizer(decoder=decoders.Replace("a", "b" * 65)),
            "decoder can make 65 characters of one",
        ),
        (
            tokenizer(models.BPE(vocab={"a": 0}, merges=[], continuing_subword_prefix="x" * 2000)),
            "continuing_subword_prefix has 2000 characters",
        ),
        (
            tokenizer(models.BPE(vocab={"a": 0}, merges=[], end_of_word_suffix="x" * 2000)),
            "end_of_word_suffix has 2000 characters",
        ),
    ],
)
def test_what_multiplies_is_refused(backend: Tokenizer, problem: str) -> None:
    with pytest.raises(CheckpointError, match=problem):
        AutoTokenizer(backend)


@pytest.mark.parametrize(
    ("normalizer", "factor"),
    [
        (None, 1),
        (normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), 1),
        (normalizers.NFC(), 3),
        (charsmap("x" * 18), 18),
        (normalizers.Sequence([normalizers.NFKD(), normalizers.Replace(Regex(" {2,}"), " ")]), 36),
    ],
)
def test_what_real_tokenizers_do_is_allowed(normalizer: Any, factor: int) -> None:
    assert text_growth(tokenizer(normalizer=normalizer)).factor == factor


def test_a_text_is_measured_before_it_is_encoded() -> None:
    growing = AutoTokenizer(tokenizer(normalizer=normalizers.Replace(" ", "a" * 64)))
    assert len(growing.encode(" ")) == 64
    with pytest.raises(RequestError, match=f"at most {MAX_TEXT} may be made: send less text"):
        growing.encode(" " * (MAX_TEXT // 64 + 1))


def test_special_tokens_in_number_are_not_added() -> None:
    many = processors.TemplateProcessing(single="$A" + " x" * 1025, special_tokens=[("x", 1)])
    with pytest.raises(CheckpointError, match=r"post_processor can add \d+ tokens"):
        AutoTokenizer(tokenizer(post_processor=many))


PLUGIN = """
from treadle.api import impl

TREADLE = {"tokenizers": ["large"]}


class Large:
    vocab_size, eos_token_id, special_token_ids, chat_template = 9, None, frozenset(), None

    def encode(self, text, *, add_special_tokens=True):
        return [1] * (len(text) * 10**4)

    def decode(self, ids, *, skip_special_tokens=True):
        return "x" * (len(ids) * 10**5)

    def id_to_token(self, token):
        return "x" * 10**5

    def token_bytes(self, token):
        return b""

    def create_detokenizer(self, prompt_ids=(), **options):
        return self

    def decode_next(self, token):
        return "x" * 10**5

    def flush(self):
        return "x" * 10**5


@impl
def treadle_tokenizer(mode):
    return Large() if mode == "large" else None
"""


def test_the_host_measures_what_any_tokenizer_makes(tmp_path: Any) -> None:
    file = tmp_path / "large.py"
    file.write_text(PLUGIN)
    plugins = PluginManager(PluginConfig(plugin_file=[str(file)]))
    large: Any = plugins.create_guarded(TOKENIZERS, "large", files=None)
    stream = large.create_detokenizer()
    for call, problem in (
        (lambda: large.encode("a" * 100), "it made 1000000 tokens of 100 characters"),
        (lambda: large.decode([1, 2]), "it made 200000 characters of 2 tokens"),
        (lambda: large.id_to_token(1), "it made 100000 characters of 1 tokens"),
        (lambda: stream.decode_next(1), "it made 100000 characters of 1 tokens"),
        (stream.flush, "it made 100000 characters of 1 tokens"),
    ):
        with pytest.raises(PluginLoadError, match=f"tokenizers:large from large.py .*{problem}"):
            call()
