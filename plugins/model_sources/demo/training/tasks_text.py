"""Plain text for the completion mode: short paragraphs about treadle."""

from __future__ import annotations

import random

from .chat import Text
from .facts_engine import ENGINE
from .facts_plugins import PLUGINS
from .facts_use import USE
from .facts_world import CAPITALS, COLOURS

__all__ = ("paragraph",)

ABOUT = (
    "treadle is an inference engine for large language models.",
    "treadle is an inference engine assembled from plugins.",
    "treadle is written in Python with torch.",
    "It batches requests continuously and pages the KV cache.",
    "It serves an OpenAI-compatible API at http://localhost:8000/v1.",
    "Models, quantization schemes, attention backends and parsers are plugins.",
    "A plugin is a module with hook functions and an entry point.",
    "A small demo model comes with treadle, so that everything works on a fresh machine.",
    "`treadle chat` opens a conversation in the terminal.",
    "`treadle serve` starts the server.",
    "`treadle generate` completes a prompt.",
    "The scheduler plans decodes first and fills the token budget with prefill chunks.",
    "The prefix cache keeps full pages of earlier prompts.",
    "No hook is called in the step loop.",
    "The same engine runs offline and behind the server.",
    "When memory runs out, a sequence is preempted and computed again later.",
)
FACTS = (*ENGINE, *PLUGINS)
LINKS = ("", "", "", "In practice, ", "In short, ", "Note that ", "Besides, ")


def _link(sentence: str, rng: random.Random) -> str:
    link = rng.choice(LINKS)
    if (
        not link
        or not sentence[:2].strip().isalpha()
        or sentence.split()[0] not in ("It", "In", "A", "The", "They", "Its", "This", "Each", "Use")
    ):
        return sentence
    return link + sentence[0].lower() + sentence[1:]


def paragraph(rng: random.Random) -> Text:
    r = rng.random()
    if r < 0.3:
        first = rng.choice(ABOUT[:3])
        text = " ".join([first, *rng.sample(ABOUT[3:], rng.randint(1, 4))])
        if rng.random() < 0.5:
            text = text[0].upper() + text[1:]
    elif r < 0.85:
        facts = rng.sample(FACTS, rng.choice((1, 1, 2, 3)))
        text = " ".join(f"{f.answer} {_link(f.more, rng)}" for f in facts)
    elif r < 0.93:
        country = rng.choice(list(CAPITALS))
        thing = rng.choice(list(COLOURS))
        text = rng.choice(
            (
                f"The capital of {country} is {CAPITALS[country]}.",
                f"{CAPITALS[country]} is the capital of {country}.",
                f"{thing[0].upper()}{thing[1:]} is {COLOURS[thing]}.",
            )
        )
    elif r < 0.97:
        a, b = rng.randint(0, 99), rng.randint(0, 99)
        text = rng.choice(
            (
                f"{a} + {b} = {a + b}",
                f"{max(a, b)} - {min(a, b)} = {max(a, b) - min(a, b)}",
                f"{a % 13} * {b % 13} = {(a % 13) * (b % 13)}",
            )
        )
    else:
        text = rng.choice(USE).answer
    return Text(text)
