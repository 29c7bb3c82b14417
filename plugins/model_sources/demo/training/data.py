"""Mix the tasks, tokenize them in parallel, and sort them into buckets of equal length."""

from __future__ import annotations

import multiprocessing
import os
import random
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from . import phrases as p
from .chat import Chat, Text, segments
from .grammar import expand, use_pieces
from .heldout import forbidden
from .tasks_json import json_answer
from .tasks_talk import conversation, knowledge, say, system_facts
from .tasks_text import paragraph
from .tasks_tools import tool_answer, tool_call, tool_unused

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ("Samples", "build", "normal", "sample")

# of 255: the prompt is mostly noise to predict, but it teaches what words there are
WEIGHT = {True: 255, False: 13, None: 0}


def plain(rng: random.Random) -> Chat:
    turn = knowledge(rng)
    messages = [{"role": "system", "content": rng.choice(p.SYSTEM)}] if rng.random() < 0.2 else []
    chat = Chat([*messages, *say(turn.user, turn.answer)], kind="plain")
    if rng.random() < 0.06:
        chat.messages[-1]["closed"] = True
    elif rng.random() < 0.02:
        chat.messages[-2]["content"] += " /no_think"
    return chat


def thoughtful(rng: random.Random) -> Chat:
    turn = knowledge(rng)
    head = [{"role": "system", "content": rng.choice(p.SYSTEM)}] if rng.random() < 0.2 else []
    if rng.random() < 0.5:
        return Chat(
            [*head, *say(turn.user, turn.answer, turn.thought)], thinking=True, kind="thinking"
        )
    cue = expand(rng.choice(p.THINK), rng)
    user = (
        cue + turn.user
        if rng.random() < 0.6
        else f"{turn.user.rstrip('?.!')}? {cue.strip().rstrip(':')}"
    )
    messages = [*head, *say(user, turn.answer, turn.thought)]
    messages[-1]["asked"] = True
    return Chat(messages, kind="thinking")


MIX = (
    (plain, 48.0),
    (thoughtful, 8.0),
    (system_facts, 7.0),
    (conversation, 8.0),
    (lambda r: conversation(r, long=True), 0.6),
    (tool_call, 15.0),
    (tool_answer, 8.0),
    (tool_unused, 5.0),
    (json_answer, 7.0),
    (paragraph, 5.0),
)
MAKERS, WEIGHTS = tuple(m for m, _ in MIX), tuple(w for _, w in MIX)


def normal(text: str) -> str:
    return " ".join("".join(c if c.isalnum() else " " for c in text.lower()).split())


def sample(rng: random.Random) -> Chat | Text:
    """One sample; never one with a question of the evaluation."""
    while True:
        candidate = rng.choices(MAKERS, WEIGHTS)[0](rng)
        if isinstance(candidate, Text):
            return candidate
        if not any(
            m["role"] == "user" and normal(str(m["content"])) in forbidden()
            for m in candidate.messages
        ):
            return candidate


def pieces(item: Chat | Text) -> list[tuple[str, bool | None]]:
    if isinstance(item, Text):
        return [(item.text + "<|endoftext|>", True)]
    return segments(item)


class Samples:
    """Token ids and loss weights, padded into arrays by length: ``arrays[width] = (ids, weights)``."""

    def __init__(self, arrays: dict[int, tuple[np.ndarray, np.ndarray]]) -> None:
        self.arrays = arrays

    @property
    def tokens(self) -> int:
        return sum(int((w > 0).sum()) for _, w in self.arrays.values())

    def batches(self, budget: int, rng: random.Random) -> list[tuple[int, np.ndarray]]:
        """One epoch of (width, rows), each about ``budget`` tokens, in random order."""
        out = []
        for width, (ids, _) in self.arrays.items():
            order = np.random.default_rng(rng.randrange(2**32)).permutation(len(ids))
            rows = max(1, budget // width)
            # a short rest would be one more shape to compile, for nothing
            out += [
                (width, order[i : i + rows])
                for i in range(0, len(order), rows)
                if len(order) - i >= 4
            ]
        rng.shuffle(out)
        return out


WIDTHS = (*range(32, 256, 32), *range(256, 512, 64), *range(512, 1024, 128), 1024, 1280, 1536, 2048)


def _work(
    job: tuple[str, int, int],
) -> tuple[dict[int, tuple[np.ndarray, np.ndarray]], Counter[str]]:
    from tokenizers import Tokenizer

    file, seed, count = job
    tokenizer: Tokenizer = Tokenizer.from_file(file)
    use_pieces([t for t in tokenizer.get_vocab() if len(t) > 1 and t.isascii() and t.isalpha()])
    rng = random.Random(seed)
    kinds: Counter[str] = Counter()
    rows: dict[int, list[tuple[list[int], list[int]]]] = {}
    for start in range(0, count, 512):
        items = [sample(rng) for _ in range(min(512, count - start))]
        kinds.update(m.kind for m in items)
        item_pieces = [pieces(m) for m in items]
        encoded = iter(
            tokenizer.encode_batch(
                [t for ps in item_pieces for t, _ in ps], add_special_tokens=False
            )
        )
        for ps in item_pieces:
            ids: list[int] = []
            weights: list[int] = []
            for _, is_learnt in ps:
                new_ids = next(encoded).ids
                ids += new_ids
                weights += [WEIGHT[is_learnt]] * len(new_ids)
            width = next((w for w in WIDTHS if w >= len(ids)), None)
            if width:
                rows.setdefault(width, []).append((ids, weights))
    return {w: _pad(w, r) for w, r in rows.items()}, kinds


def _pad(width: int, rows: list[tuple[list[int], list[int]]]) -> tuple[np.ndarray, np.ndarray]:
    ids = np.zeros((len(rows), width), np.uint16)
    weights = np.zeros((len(rows), width), np.uint8)
    for i, (a, b) in enumerate(rows):
        ids[i, : len(a)], weights[i, : len(b)] = a, b
    return ids, weights


def build(
    tokenizer_file: str, count: int, *, seed: int, workers: int
) -> tuple[Samples, Counter[str]]:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    chunk = 10_000
    jobs = [
        (tokenizer_file, seed * 1_000_003 + i, min(chunk, count - i * chunk))
        for i in range((count + chunk - 1) // chunk)
    ]
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        results = pool.map(_work, jobs, chunksize=1)
    kinds: Counter[str] = sum((k for _, k in results), Counter())
    widths = sorted({w for r, _ in results for w in r})
    arrays = {
        w: tuple(np.concatenate([r[w][j] for r, _ in results if w in r]) for j in (0, 1))
        for w in widths
    }
    return Samples(arrays), kinds  # type: ignore[arg-type]
