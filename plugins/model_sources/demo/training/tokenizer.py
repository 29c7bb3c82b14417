"""Train the tokenizer and write everything beside the weights that a chat model needs.

It is byte-level BPE with one twist: a space belongs to the next word only for words that are
frequent in the facts. Names, places and invented words are cut in the same way at the start of a
JSON string and in the middle of a sentence, so that copying them is copying tokens.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from .facts_engine import ENGINE
from .facts_plugins import PLUGINS
from .facts_use import USE

__all__ = ("CONTEXT", "IM_END", "SPECIAL", "train_tokenizer", "write_files")

CONTEXT = 2048
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
IM_END = 2
HERE = Path(__file__).parent


def frequent_words(min_count: int = 2) -> list[str]:
    text = " ".join(f"{f.answer} {f.more}" for f in (*ENGINE, *PLUGINS, *USE))
    counts = Counter(re.findall(r"(?<= )[a-z]+(?![A-Za-z])", text))
    question_words = [
        "what",
        "how",
        "do",
        "does",
        "you",
        "tell",
        "me",
        "can",
        "could",
        "would",
        "please",
        "explain",
        "about",
        "know",
        "which",
        "who",
        "my",
        "give",
    ]
    return sorted({w for w, n in counts.items() if n >= min_count} | set(question_words))


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    words = "|".join(frequent_words())
    pattern = rf" (?:{words})(?!\p{{L}})|\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+|\s"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(MARKS),
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(m, special=False, normalized=False) for m in MARKS])
    return tokenizer


def write_files(folder: Path, tokenizer: Tokenizer) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    start, end = SPECIAL[0], SPECIAL[2]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": end,
        "pad_token": start,
        "unk_token": None,
        "extra_special_tokens": [SPECIAL[1]],
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    generation = {
        "eos_token_id": [IM_END, 0],
        "pad_token_id": 0,
        "do_sample": True,
        "temperature": 0.2,
        "top_p": 0.9,
        "top_k": 20,
    }
    for name, value in (("tokenizer_config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n")
    template = (HERE / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text(template)
