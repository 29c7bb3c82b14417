"""Small tokenizers of each family, made on the spot, with the decoders of published models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "Hello world, this is a test of the tokenizer: does it work?",
    "The quick brown fox jumps over the lazy dog. It's 12345 o'clock!",
    "naïve café — Ünïcödé, 日本語のテキスト, русский текст, 😀👩‍👩‍👧 emoji",
    "def main():\n    return {'key': [1, 2, 3]}\n\n\nstop here",
    "<|im_start|>user\nWhat is <b>this</b>?<|im_end|>",
] * 4

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen."""
    tok = Tokenizer(models.BPE())
    tok.normalizer = normalizers.NFC()
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tok.train_from_iterator(CORPUS, trainer)
    tok.add_tokens(
        [AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)]
    )
    tok.add_tokens(["<tool_call>", "日本"])
    return tok


def sentence_piece(strip: bool = True) -> Tokenizer:
    """As Llama 2 and Mistral (with ``strip``) and Gemma (without)."""
    vocab: dict[str, int] = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    merges: list[tuple[str, str]] = []
    for char in (
        "▁abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,:;!?'\"-<>|_/[]()0123456789é日本\n"
    ):
        vocab.setdefault(char, len(vocab))
    for left, right in [
        ("t", "h"),
        ("th", "e"),
        ("▁", "the"),
        ("▁", "H"),
        ("▁H", "e"),
        ("l", "o"),
        ("▁", "w"),
        ("▁", "▁"),
    ]:
        merges.append((left, right))
        vocab.setdefault(left + right, len(vocab))
    tok = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip:
        tok.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tok.normalizer = normalizers.Replace(" ", "▁")
    tok.decoder = decoders.Sequence(steps)
    tok.add_special_tokens(
        [
            AddedToken(t, special=True, normalized=False)
            for t in ("<unk>", "<s>", "</s>", "[INST]", "[/INST]")
        ]
    )
    tok.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return tok


def metaspace() -> Tokenizer:
    """As T5 and ALBERT: Unigram under a Metaspace decoder."""
    tok = Tokenizer(models.Unigram())
    tok.pre_tokenizer = pre_tokenizers.Metaspace()
    tok.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200,
        special_tokens=["<pad>", "</s>", "<unk>"],
        unk_token="<unk>",
        show_progress=False,
    )
    tok.train_from_iterator(CORPUS, trainer)
    return tok


def word_piece() -> Tokenizer:
    """As BERT."""
    tok = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tok.pre_tokenizer = pre_tokenizers.Whitespace()
    tok.decoder = decoders.WordPiece()
    tok.train_from_iterator(
        CORPUS,
        trainers.WordPieceTrainer(
            vocab_size=300, special_tokens=["[UNK]", "[SEP]"], show_progress=False
        ),
    )
    return tok


def words() -> Tokenizer:
    """One id per word and no decoder."""
    tok = Tokenizer(
        models.WordLevel(
            {"[UNK]": 0, "hello": 1, "world": 2, "stop": 3, "<end>": 4}, unk_token="[UNK]"
        )
    )
    tok.pre_tokenizer = pre_tokenizers.Whitespace()
    tok.add_special_tokens(["<end>"])
    return tok


FAMILIES = {
    "byte_level": byte_level,
    "sentence_piece": sentence_piece,
    "gemma": lambda: sentence_piece(strip=False),
    "metaspace": metaspace,
    "word_piece": word_piece,
    "words": words,
}


def save(
    tok: Tokenizer, folder: Path, config: dict[str, Any] | None = None, template: str | None = None
) -> Path:
    """Write a tokenizer as a checkpoint has it."""
    folder.mkdir(parents=True, exist_ok=True)
    tok.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "TokenizersBackend", **(config or {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder
