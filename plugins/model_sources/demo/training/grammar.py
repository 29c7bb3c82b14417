"""Templates: ``[a|b]`` is a choice, may be nested, and ``{name}`` is a slot filled later."""

from __future__ import annotations

import random
from functools import cache

from .common import ADJECTIVES, NOUNS

__all__ = ("expand", "fill", "invent", "question", "roughen", "use_pieces", "vary", "word")

Node = str | tuple["Node", ...] | list["Node"]  # text, sequence, choice

BEFORE = (
    "please ",
    "hi, ",
    "hello, ",
    "hey, ",
    "ok, ",
    "so, ",
    "quick question: ",
    "excuse me, ",
    "well, ",
    "one question: ",
    "sorry, ",
    "hi! ",
    "Hello! ",
    "now ",
    "and ",
    "question: ",
    "hmm, ",
    "dear model, ",
)
AFTER = (
    " please",
    ", please",
    " thanks",
    " thank you",
    ", thanks",
    " now",
    " for me",
    ", if you can",
)
LEADS = (
    "I was wondering[,|:] ",
    "I wonder[,|:] ",
    "My [boss|friend|teacher|son|mother|neighbour] [asks|wants to know|asked me][,|:] ",
    "For [a test|a quiz|school|a report|my notes|my blog][,|:] ",
    "Just curious[,|:] ",
    "[Can|May] I ask[,|:] ",
    "There is one thing I want to know: ",
    "Here is my question: ",
    "Next[ question|]: ",
    "I need your help: ",
    "Listen, ",
    "Let me ask: ",
    "You know what? ",
    "Before I go: ",
    "While we are at it, ",
    "As a beginner I ask: ",
    "Ok so ",
    "Right, ",
    "[Any|Some] idea[,|:] ",
    "Tell me: ",
    "Be honest: ",
    "Look, ",
    "Actually, ",
    "By the way, ",
    "Once more: ",
    "Again: ",
    "First of all, ",
    "Then ",
    "Assistant, ",
    "Hey model, ",
    "I am [new|curious|confused][.|:] ",
    "Thanks! ",
    "Great. ",
    "No, ",
    "Yes. ",
    "Sure, ",
    "Do you know: ",
    "[It is|it's] late, but ",
)
TAILS = (
    " I am new here.",
    " I need it for school.",
    " Be quick.",
    " It is urgent.",
    " Just wondering.",
    " I always forget.",
    " I am curious.",
    " Any idea?",
    " I cannot remember.",
    " Tell me.",
    " Thank you!",
    " I would be glad.",
    " Do you know?",
    " That is my question.",
    " lol",
    " :)",
    " ...",
    " Anyone?",
    " I am stuck.",
    " Be honest.",
    " Explain.",
    " I have to know.",
    " Help!",
)
SMALL = frozenset(
    [
        "a",
        "an",
        "the",
        "is",
        "are",
        "of",
        "in",
        "to",
        "do",
        "does",
        "it",
        "me",
        "my",
        "you",
        "your",
        "please",
        "for",
        "with",
        "and",
    ]
)
PIECES: list[str] = []
VOWELS, CONSONANTS = "aeiou", "bcdfghjklmnprstvwz"
KEYS = "abcdefghijklmnopqrstuvwxyz"


@cache
def parse(template: str) -> Node:
    node, end = _sequence(template, 0, top=True)
    if end != len(template):
        raise ValueError(f"unbalanced brackets in {template!r}")
    return node


def _sequence(s: str, i: int, *, top: bool) -> tuple[Node, int]:
    parts: list[Node] = []
    text = ""
    while i < len(s):
        c = s[i]
        if c == "[":
            options: list[Node] = []
            i += 1
            while True:
                option, i = _sequence(s, i, top=False)
                options.append(option)
                if i >= len(s):
                    raise ValueError(f"unclosed bracket in {s!r}")
                i += 1
                if s[i - 1] == "]":
                    break
            parts += [text, options]
            text = ""
        elif c in "|]" and not top:
            break
        else:
            text += c
            i += 1
    parts.append(text)
    return (parts[0] if len(parts) == 1 else tuple(parts)), i


def expand(template: str, rng: random.Random) -> str:
    """Choose one way through a template."""
    if "[" not in template:
        return template
    return _walk(parse(template), rng)


def _walk(node: Node, rng: random.Random) -> str:
    if isinstance(node, str):
        return node
    if isinstance(node, list):
        return _walk(node[int(rng.random() * len(node))], rng)
    return "".join([_walk(n, rng) for n in node])


def fill(text: str, slots: dict[str, str]) -> str:
    # str.format would trip over JSON braces in the text
    for name, value in slots.items():
        text = text.replace("{" + name + "}", value)
    return text


def typo(text: str, rng: random.Random) -> str:
    """Damage one word of five letters or more; slots, code and numbers stay as they are."""
    words = text.split(" ")
    candidates = [i for i, w in enumerate(words) if len(w) >= 5 and w.isalpha()]
    if not candidates:
        return text
    i = rng.choice(candidates)
    w = words[i]
    pos = rng.randrange(1, len(w) - 1)
    kind = rng.randrange(4)
    if kind == 0:
        w = w[:pos] + w[pos + 1] + w[pos] + w[pos + 2 :]
    elif kind == 1:
        w = w[:pos] + w[pos + 1 :]
    elif kind == 2:
        w = w[:pos] + w[pos] + w[pos:]
    else:
        w = w[:pos] + rng.choice(KEYS) + w[pos + 1 :]
    words[i] = w
    return " ".join(words)


def disturb(text: str, rng: random.Random) -> str:
    """Drop a small word, or put a word in that has no business there."""
    words = text.split(" ")
    if len(words) < 4:
        return text
    if rng.random() < 0.6:
        candidates = [i for i, w in enumerate(words) if w.lower() in SMALL]
        if candidates:
            del words[rng.choice(candidates)]
    else:
        words.insert(
            rng.randrange(1, len(words)),
            rng.choice(
                (
                    word(rng),
                    rng.choice(
                        (
                            "um",
                            "like",
                            "well",
                            "so",
                            "really",
                            "just",
                            "actually",
                            "maybe",
                            "again",
                            "here",
                            "now",
                            "exactly",
                        )
                    ),
                )
            ),
        )
    return " ".join(words)


def _lower(text: str) -> str:
    return text if text[:2] in ("I ", "I'") else text[0].lower() + text[1:]


def roughen(text: str, rng: random.Random, *, case: bool = True) -> str:
    """Write a question as people type it. ``case=False`` leaves letters that will be copied."""
    if case and rng.random() < 0.10:
        text = disturb(text, rng)
    r = rng.random()
    if r < 0.18:
        text = rng.choice(BEFORE) + _lower(text)
    elif r < 0.34:
        text = expand(rng.choice(LEADS), rng) + (_lower(text) if rng.random() < 0.7 else text)
    r = rng.random()
    if r < 0.09:
        mark = text[-1] if text[-1] in "?.!" else ""
        text = text.rstrip("?.!") + rng.choice(AFTER) + mark
    elif case and r < 0.19:
        text = text + ("." if text[-1].isalnum() else "") + rng.choice(TAILS)
    r = rng.random()
    if r < 0.25:
        text = text.rstrip("?.!")
    elif r < 0.30:
        text = text.rstrip("?.!") + rng.choice(("?", "??", "!", ".", " ?", "...", "?!"))
    r = rng.random()
    if case and r < 0.25:
        text = text.lower()
    elif case and r < 0.27:
        text = text.upper()
    elif r < 0.6 and "{" not in text[:2]:
        text = text[0].upper() + text[1:]
    if rng.random() < 0.13:
        text = typo(text, rng)
    return text


def question(template: str, rng: random.Random, **slots: str) -> str:
    """A question whose slot values may be changed in case with the rest."""
    return roughen(fill(expand(template, rng), slots), rng)


def vary(template: str, rng: random.Random, **slots: str) -> str:
    """A question whose slot values stay exact, because the answer copies them."""
    return fill(roughen(expand(template, rng), rng, case=False), slots)


def use_pieces(pieces: list[str]) -> None:
    """From now on half of the invented words are made of these, the tokens of the vocabulary.

    A token is copied well only if it was copied in training, so that every token has to occur.
    """
    PIECES[:] = pieces


def word(rng: random.Random) -> str:
    """A common word or an invented one."""
    r = rng.random()
    if r < 0.45:
        return rng.choice(NOUNS)
    return rng.choice(ADJECTIVES) if r < 0.6 else invent(rng)


def invent(rng: random.Random, syllables: int | None = None) -> str:
    """A word that means nothing."""
    if PIECES and rng.random() < 0.5:
        return "".join(rng.choice(PIECES) for _ in range(rng.choice((1, 2, 2, 3))))
    n = syllables or rng.choice((1, 2, 2, 2, 3, 3))
    return "".join(
        rng.choice(CONSONANTS)
        + rng.choice(("", "", "", "r", "l"))
        + rng.choice(VOWELS)
        + rng.choice(("", "", "n", "r", "s", "l", "t", "m"))
        for _ in range(n)
    )
