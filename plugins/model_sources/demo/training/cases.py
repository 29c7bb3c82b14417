"""The evaluation: held-out questions, each with what a right answer must hold."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from . import heldout as h
from .chat import Chat, Text
from .facts_engine import ENGINE
from .facts_plugins import PLUGINS
from .facts_use import USE
from .facts_world import CAPITALS, COLOURS, MIXES
from .heldout_tools import CALC, EXTRACTS, JSON_FORMS, KNOWN, NEW, RESULTS, SEARCH, WEATHER

__all__ = ("Case", "cases")


@dataclass(frozen=True, slots=True)
class Case:
    kind: str
    chat: Chat
    check: str
    want: Any
    text: Text | None = None  # a plain-text prompt instead of the chat


def _user(text: str, *, head: str = "", held: bool = True) -> list[dict[str, Any]]:
    system = [{"role": "system", "content": head}] if head else []
    return [*system, {"role": "user", "content": text, "held": held}]


def _said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _one(kind: str, text: str, check: str, expected: Any, **extra: Any) -> Case:
    return Case(kind, Chat(_user(text), **extra), check, expected)


@lru_cache(maxsize=1)
def cases() -> tuple[Case, ...]:
    rng = random.Random(20)
    return (
        *_treadle(rng),
        *_sums(rng),
        *_world(rng),
        *_talk(),
        *_tools(rng),
        *_json(rng),
        *_thinking(rng),
        *_chats(rng),
        *_texts(),
    )


def _treadle(rng: random.Random) -> list[Case]:
    out = []
    facts = {f.key: f for f in (*USE, *PLUGINS, *ENGINE)}
    for f in (*PLUGINS, *ENGINE):
        for frame in rng.sample(h.CONCEPT, 2):
            out.append(
                _one(
                    "treadle: concepts",
                    frame.replace("{x}", rng.choice(f.names.split("|"))),
                    "words",
                    f.check,
                )
            )
    out += [
        _one("treadle: how to", q, "words", facts[key].check)
        for key, questions in h.USE.items()
        for q in questions
    ]
    return out


def _sums(rng: random.Random) -> list[Case]:
    out = []
    for op, frames in h.SUMS.items():
        for _ in range(40):
            a, b = (
                (rng.randint(2, 12) for _ in range(2))
                if op == "*"
                else sorted((rng.randint(1, 99) for _ in range(2)), reverse=True)
            )
            result = {"+": a + b, "-": a - b, "*": a * b}[op]
            out.append(
                _one(
                    "arithmetic",
                    rng.choice(frames).replace("{a}", str(a)).replace("{b}", str(b)),
                    "number",
                    result,
                )
            )
    for op, frame in h.STORIES * 4:
        a, b = rng.randint(8, 30), rng.randint(2, 8)
        result = {"+": a + b, "-": a - b, "*": a * b}[op]
        out.append(
            _one(
                "arithmetic: stories",
                frame.replace("{a}", str(a)).replace("{b}", str(b)),
                "number",
                result,
            )
        )
    return out


def _world(rng: random.Random) -> list[Case]:
    out = [
        _one("capitals", rng.choice(h.CAPITAL).replace("{x}", k), "words", c.lower())
        for k, c in rng.sample(list(CAPITALS.items()), 80)
    ]
    out += [
        _one("colours", rng.choice(h.COLOUR).replace("{x}", t), "words", c)
        for t, c in rng.sample(list(COLOURS.items()), 40)
    ]
    out += [
        _one("colours", f.replace("{a}", a).replace("{b}", b), "words", mix)
        for (a, b), mix in MIXES.items()
        for f in rng.sample(h.MIX, 1)
    ]
    return out


def _talk() -> list[Case]:
    return [
        *(_one("small talk", q, "words", expected) for q, expected in h.TALK),
        *(_one("outside", q, "words", "don't know") for q in h.OUTSIDE),
    ]


def _tools(rng: random.Random) -> list[Case]:
    out = [
        _one("tools: call", q, "call", (name, args), tools=list(tools))
        for tools, q, name, args in KNOWN
    ]
    out += [
        _one("tools: new kinds", q, "call", (name, args), tools=list(tools))
        for tools, q, name, args in NEW
    ]
    for spec, q, args, result, words in RESULTS:
        call = {
            "type": "function",
            "function": {"name": spec["function"]["name"], "arguments": args},
        }
        chat = Chat(
            [
                *_user(q),
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": result},
            ],
            [spec],
        )
        out.append(Case("tools: result", chat, "words", "\n".join(words)))
    countries = rng.sample(list(CAPITALS.items()), 6)
    idle = [(h.CAPITAL[i % 6].replace("{x}", k), c.lower()) for i, (k, c) in enumerate(countries)]
    idle += [
        (h.USE["install"][0], "pip install"),
        (h.USE["serve"][0], "treadle serve"),
        ("Teach me about paged attention.", "page table"),
        (h.USE["chat"][1], "treadle chat"),
        ("Hey, nice to meet you!", "help you"),
        ("Thanks, that was useful!", "welcome"),
    ]
    idle += [
        (q, "don't know")
        for q in (
            "Who painted the Mona Lisa?",
            "How do bees make honey?",
            "What is a mortgage?",
            "Explain recursion.",
        )
    ]
    tools = ([WEATHER], [WEATHER, CALC], [WEATHER, SEARCH][:1])
    out += [
        _one("tools: not needed", q, "words", expected, tools=list(tools[i % 3]))
        for i, (q, expected) in enumerate(idle)
    ]
    return out


def _json(rng: random.Random) -> list[Case]:
    out = []
    for i, (country, city) in enumerate(rng.sample(list(CAPITALS.items()), 12)):
        q = (
            JSON_FORMS[i % 6]
            .replace("{q}", f"What is the capital of {country}?")
            .replace("{k}", "country and capital")
        )
        out.append(
            _one("json", q, "json", {"country": country.removeprefix("the "), "capital": city})
        )
    for i, (text, expected) in enumerate(EXTRACTS):
        out.append(
            _one(
                "json",
                JSON_FORMS[i % 6].replace("{q}", text).replace("{k}", ", ".join(expected)),
                "json",
                expected,
            )
        )
    for a, b in ((12, 30), (7, 8), (45, 9), (61, 20)):
        out.append(
            _one(
                "json",
                JSON_FORMS[a % 6]
                .replace("{q}", f"What is {a} + {b}?")
                .replace("{k}", "expression and result"),
                "json",
                {"expression": f"{a} + {b}", "result": a + b},
            )
        )
    return out


def _thinking(rng: random.Random) -> list[Case]:
    prompts = (
        "Think about it, then answer: {q}",
        "{q} Please think step by step.",
        "First think, then answer. {q}",
        "Do some thinking first. {q}",
        "{q} Please reason before answering.",
    )
    out = []
    for i in range(12):
        a, b = rng.randint(11, 89), rng.randint(11, 89)
        q = rng.choice(h.SUMS["+"]).replace("{a}", str(a)).replace("{b}", str(b))
        out.append(_one("thinking", q, "thought_number", a + b, thinking=True))
        out.append(_one("thinking", prompts[i % 5].replace("{q}", q), "thought_number", a + b))
    for i, (country, city) in enumerate(rng.sample(list(CAPITALS.items()), 6)):
        out.append(
            _one(
                "thinking",
                h.CAPITAL[i].replace("{x}", country),
                "thought_words",
                city.lower(),
                thinking=True,
            )
        )
    out += [
        _one("thinking", q, "thought_words", "don't know", thinking=True) for q in h.OUTSIDE[:3]
    ]
    out += [
        _one(
            "thinking",
            h.USE[k][0],
            "thought_words",
            next(f.check for f in USE if f.key == k),
            thinking=True,
        )
        for k in ("install", "serve", "chat")
    ]
    tools, q, name, args = KNOWN[0]
    out.append(_one("thinking", q, "thought_call", (name, args), tools=list(tools), thinking=True))
    out += [
        _one("thinking", h.CAPITAL[1].replace("{x}", k), "words", c.lower(), thinking=False)
        for k, c in rng.sample(list(CAPITALS.items()), 4)
    ]
    return out


def _chats(rng: random.Random) -> list[Case]:
    out = []
    for name in ("Tobias", "Marga", "Yllka"):
        chat = [
            *_user(f"Hello, I'm {name}.", held=False),
            _said(f"Hello {name}! How can I help you?"),
            *_user("Can you recall my name?"),
        ]
        out.append(Case("conversation", Chat(chat), "words", name.lower()))
    for a, b in (rng.sample(list(CAPITALS), 2) for _ in range(5)):
        chat = [
            *_user(h.CAPITAL[0].replace("{x}", a), held=False),
            _said(f"The capital of {a} is {CAPITALS[a]}."),
            *_user(f"And what about {b}?"),
        ]
        out.append(Case("conversation", Chat(chat), "words", CAPITALS[b].lower()))
    for f in rng.sample(ENGINE, 5):
        chat = [
            *_user(f"Teach me about {f.names.split('|')[0]}.", held=False),
            _said(f.answer),
            *_user("Interesting, could you say more?"),
        ]
        out.append(
            Case(
                "conversation",
                Chat(chat),
                "words",
                "\n".join(f.more.lower().split(". ")[0].split(", ")[:1]),
            )
        )
    greeting = [*_user("Hi!", held=False), _said("Hello! How can I help you?")]
    out.append(
        Case("conversation", Chat([*greeting, *_user(h.USE["install"][1])]), "words", "pip install")
    )
    out.append(
        Case(
            "conversation",
            Chat([*greeting, *_user("Who painted the Mona Lisa?")]),
            "words",
            "don't know",
        )
    )
    out.append(Case("conversation", Chat([*greeting, *_user("quick, 31 + 17")]), "number", 48))
    for head, q, expected in (
        ("You are Brio, a polite helper.", "Could you tell me your name?", "brio"),
        ("The wifi code is plonk77. Be polite.", "Which wifi code do you have?", "plonk77"),
        ("You help visitors. The room number is 412.", "Would you tell me the room number?", "412"),
        ("The meeting place is Gent.", "Do you happen to know the meeting place?", "gent"),
        ("Your name is Quilla.", "And who might you be?", "quilla"),
        ("You are a helpful assistant.", h.USE["serve"][2], "treadle serve"),
    ):
        out.append(Case("system prompts", Chat(_user(q, head=head)), "words", expected))
    return out


def _texts() -> list[Case]:
    starts = (
        "treadle is",
        "Treadle is an inference",
        "A page is",
        "The KV cache",
        "Prefill is the",
        "A plugin is",
        "Quantization",
        "The scheduler decides",
        "Continuous batching lets",
        "Temperature divides",
    )
    return [Case("plain text", Chat([]), "english", 8, Text(s)) for s in starts]
