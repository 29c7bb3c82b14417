"""The prompts of a benchmark: random words, or those of a file."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from treadle.errors import ConfigError
from treadle.regular_files import read_regular
from treadle_cli.bench.serve.config import ServeBenchConfig

__all__ = ("WORDS", "Prompt", "WordCost", "prompts", "words")

MAX_FILE_BYTES = 2 * 2**30
DEFAULT_OUTPUT_LEN = 128
CHARS_PER_TOKEN = 4
"""Of an English text, roughly: only for the length of an answer in a ShareGPT file."""

# Common words: a token each in most vocabularies. What they cost in the server's is measured.
WORD_LIST = (
    "about after again all also and any back because before between book call can city clear "
    "come could country day different down each early end even every example eye face fact "
    "family far feel find first follow from general give good great group hand have head help "
    "here high home house idea if important into just keep kind know large last learn leave "
    "left life light like line little long look make man many may mean might money more most "
    "mother move much must name need never new next night number off often old once open "
    "order other over own part people place plant play point problem program public question "
    "read real right room run same say school see seem set several she should show side small "
    "so some sound state still stop story study such system take tell than that the their "
    "them then there these thing think this those thought three time to too tree turn two "
    "under until up use very want water way well what when where which while white why will "
    "with without word work world would write year you young "
)
WORDS = WORD_LIST.split()


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request: its text and the most tokens that its answer may have."""

    text: str
    output_len: int


@dataclass(frozen=True, slots=True)
class WordCost:
    """How many tokens a server counts for ``WORDS``: some for each, and some for each request."""

    per_word: float = 1.0
    per_request: float = 0.0

    def num_words(self, tokens: int) -> int:
        return max(1, round((tokens - self.per_request) / self.per_word))


def words(draw: random.Random, count: int) -> str:
    return " ".join(draw.choices(WORDS, k=count))


def prompts(config: ServeBenchConfig, cost: WordCost) -> list[Prompt]:
    """Return the requests of a run. Raises ``ConfigError`` for a file that has none."""
    draw = random.Random(config.seed)
    if config.dataset_name == "random":
        return list(_random(config, cost, draw))
    if config.dataset_path is None:
        raise ConfigError(f"the dataset {config.dataset_name} is a file; give --dataset-path")
    path = Path(config.dataset_path)
    try:
        content = read_regular(path, MAX_FILE_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset-path {path} cannot be read: {error}") from error
    if config.dataset_name == "sonnet":
        return list(_sonnet(config, cost, draw, content, path))
    read = _sharegpt if config.dataset_name == "sharegpt" else _custom
    found = list(read(content, config.output_len, path))
    if not found:
        raise ConfigError(f"--dataset-path {path} has no prompt")
    draw.shuffle(found)
    return list(itertools.islice(itertools.cycle(found), config.num_prompts))


def _random(config: ServeBenchConfig, cost: WordCost, draw: random.Random) -> Iterator[Prompt]:
    def length(mean: int) -> int:
        spread = config.random_range_ratio
        return max(1, round(draw.uniform(mean * (1 - spread), mean * (1 + spread))))

    if config.random_prefix_len >= config.input_len:
        raise ConfigError(
            f"random_prefix_len is {config.random_prefix_len}, part of input_len "
            f"{config.input_len}; make it less"
        )
    num_shared = round(config.random_prefix_len / cost.per_word)
    prefix = words(draw, num_shared) + " " if num_shared else ""
    for _ in range(config.num_prompts):
        count = max(1, cost.num_words(length(config.input_len)) - num_shared)
        output_len = length(config.output_len or DEFAULT_OUTPUT_LEN)
        yield Prompt(prefix + words(draw, count), output_len)


def _sonnet(
    config: ServeBenchConfig, cost: WordCost, draw: random.Random, content: str, path: Path
) -> Iterator[Prompt]:
    """Lines of a poem, drawn until the prompt is long enough."""
    lines = [line.strip() for line in content.splitlines() if line.strip()]
    if not lines:
        raise ConfigError(f"--dataset-path {path} has no line")
    for _ in range(config.num_prompts):
        text, num_words = "Pick as many lines as you can from these poem lines:\n", 11
        while num_words < cost.num_words(config.input_len):
            line = draw.choice(lines)
            text, num_words = f"{text}{line}\n", num_words + len(line.split())
        yield Prompt(text, config.output_len or DEFAULT_OUTPUT_LEN)


def _sharegpt(content: str, output_len: int | None, path: Path) -> Iterator[Prompt]:
    """The first question of each conversation; its answer says how long one is."""
    for entry in _json(content, path):
        turns = entry.get("conversations", entry.get("conversation"))
        if not isinstance(turns, list) or len(turns) < 2:
            continue
        values = [turn.get("value") for turn in turns[:2] if isinstance(turn, dict)]
        texts = [value for value in values if isinstance(value, str) and value]
        if len(texts) == 2:
            yield Prompt(texts[0], output_len or max(1, len(texts[1]) // CHARS_PER_TOKEN))


def _custom(content: str, output_len: int | None, path: Path) -> Iterator[Prompt]:
    """JSON lines with ``prompt`` and perhaps ``output_tokens``; or text, a prompt a line."""
    if path.suffix not in (".jsonl", ".json"):
        for line in content.splitlines():
            if line.strip():
                yield Prompt(line, output_len or DEFAULT_OUTPUT_LEN)
        return
    for entry in _json(content, path):
        text, own = entry.get("prompt"), entry.get("output_tokens")
        if not isinstance(text, str) or not isinstance(own, int | None):
            raise ConfigError(f"--dataset-path {path}: {str(entry)[:80]} has no text in prompt")
        yield Prompt(text, output_len or own or DEFAULT_OUTPUT_LEN)


def _json(content: str, path: Path) -> Sequence[dict[str, Any]]:
    """The objects of a JSON array or of JSON lines."""
    try:
        if content.lstrip().startswith("["):
            return msgspec.json.decode(content, type=list[dict[str, Any]])
        return msgspec.json.Decoder(dict[str, Any]).decode_lines(content)
    except msgspec.DecodeError as error:
        raise ConfigError(f"--dataset-path {path} is not JSON: {error}") from error
