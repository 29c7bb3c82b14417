"""Answers in JSON, with the keys that the user asks for."""

from __future__ import annotations

import json
import random
from typing import Any

from .chat import Chat
from .facts_world import CAPITALS, COLOURS
from .grammar import expand, invent, vary
from .tasks_talk import say
from .tool_kinds import Value
from .words import CITIES, FIRST_NAMES, ITEMS, JOBS

__all__ = ("json_answer",)

FORMS = (
    "[Make|Build|Create|Write|Generate] JSON with {k}[.|:] {q}",
    "[JSON|As JSON|JSON object] ({k}): {q}",
    "[Answer|Reply|Respond] as JSON ({k})[.|:] {q}",
    "{q} ({k}, as JSON)",
    "[Fill|Output] [the keys|the fields|] {k} [in JSON|as JSON][.|:] {q}",
    "{q} [I need|Give me] [it as |the answer as |]JSON[:| with|,] {k}[.|]",
    "[Turn|Put|Convert] [this|it] [into|to] JSON with {k}[.|:] {q}",
    "{q} [Answer|Reply|Respond] [in|as|with] [JSON|a JSON object] with [the |]keys {k}[.|]",
    "{q} [Give|Return|Write] [it|the answer] as [JSON|a JSON object] with {k}[.|]",
    "{q} JSON with keys {k}[, please|.|]",
    "[Answer|Reply] in JSON with [the |]keys {k}[.|:] {q}",
    "{q} Use JSON with the [keys|fields] {k}[.|]",
    "{q} As JSON: {k}[.|]",
    "[Return|Give me|Write] a JSON object with [the |][keys|fields] {k}[.|:] {q}",
    "{q} [Format|Output][:| as] JSON with [keys|fields] {k}[.|]",
)


def _joined(keys: list[str], rng: random.Random) -> str:
    quote = rng.choice(("", "", "", '"', "`", "'"))
    quoted = [f"{quote}{k}{quote}" for k in keys]
    if len(quoted) == 1:
        return quoted[0]
    return ", ".join(quoted[:-1]) + rng.choice((" and ", " and ", ", ", ", and ")) + quoted[-1]


def _capital(rng: random.Random) -> tuple[str, dict[str, Any]]:
    country, city = rng.choice(list(CAPITALS.items()))
    bare = country.removeprefix("the ")
    q = expand(
        rng.choice(
            (
                f"What is the capital of {country}?",
                f"[Name|Give me|Tell me] the capital of {country}.",
                f"The capital of {country}.",
                f"[{country} and its|Which city is the] capital[| of {country}]?",
            )
        ),
        rng,
    )
    return q, {
        rng.choice(("country", "country", "nation", "state", "land")): bare,
        rng.choice(("capital", "capital", "capital_city", "city")): city,
    }


def _colour(rng: random.Random) -> tuple[str, dict[str, Any]]:
    thing, shade = rng.choice(list(COLOURS.items()))
    q = expand(f"[What [colour|color] is|Tell me the colour of] {thing}?", rng)
    return q, {
        rng.choice(("thing", "object", "item", "name")): thing.split(" ", 1)[-1]
        if thing.startswith(("a ", "an ", "the "))
        else thing,
        rng.choice(("colour", "color")): shade,
    }


def _sum(rng: random.Random) -> tuple[str, dict[str, Any]]:
    op = rng.choice("+-*")
    a, b = (rng.randint(0, 12 if op == "*" else 99) for _ in range(2))
    if op == "-" and a < b:
        a, b = b, a
    result = {"+": a + b, "-": a - b, "*": a * b}[op]
    return expand(f"[What is|Calculate|Compute] {a} {op} {b}?", rng), {
        rng.choice(("expression", "sum", "question", "input")): f"{a} {op} {b}",
        rng.choice(("result", "answer", "value")): result,
    }


FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...], Value]] = {
    "name": (
        ("name", "person", "full_name", "first_name"),
        ("{v}",),
        lambda r: r.choice(FIRST_NAMES) if r.random() < 0.6 else invent(r, 2).capitalize(),
    ),
    "age": (
        ("age", "years"),
        ("is {v} years old", "is {v}", "turned {v}", "is aged {v}"),
        lambda r: r.randint(1, 99),
    ),
    "city": (
        ("city", "place", "location", "home", "town"),
        ("lives in {v}", "is from {v}", "comes from {v}", "moved to {v}"),
        lambda r: r.choice(CITIES) if r.random() < 0.7 else invent(r, 2).capitalize(),
    ),
    "job": (
        ("job", "profession", "occupation", "work"),
        ("works as a {v}", "is a {v}", "became a {v}"),
        lambda r: r.choice(JOBS),
    ),
    "item": (
        ("item", "product", "article", "purchase"),
        ("bought a {v}", "sold a {v}", "ordered a {v}", "owns a {v}"),
        lambda r: r.choice(ITEMS) if r.random() < 0.7 else invent(r),
    ),
    "pet": (
        ("pet", "animal", "companion"),
        ("has a {v}", "keeps a {v}"),
        lambda r: r.choice(
            ("dog", "cat", "rabbit", "parrot", "hamster", "turtle", "horse", "goldfish", "snake")
        ),
    ),
    "number": (
        ("number", "id", "phone", "code"),
        ("has the number {v}", "has number {v}"),
        lambda r: r.randint(1, 99999),
    ),
}


def _extract(rng: random.Random) -> tuple[str, dict[str, Any]]:
    keys = ["name", *rng.sample([k for k in FIELDS if k != "name"], rng.choice((1, 2, 2, 3)))]
    out: dict[str, Any] = {}
    clauses = []
    for k in keys:
        names, forms, value = FIELDS[k]
        v = value(rng)
        out[rng.choice(names)] = v
        clauses.append(rng.choice(forms).replace("{v}", str(v)))
    person, others = clauses[0], clauses[1:]
    text = f"{person} {' and '.join([', '.join(others[:-1]), others[-1]]) if len(others) > 1 else others[0]}."
    if rng.random() < 0.4:
        items = list(out.items())
        rng.shuffle(items)
        out = dict(items)
    lead = expand(
        rng.choice(
            (
                "[Extract|Read|Take] the data from[:|] ",
                "[Extract|Parse][:| this:] ",
                "Text: ",
                "",
                "[Here is a text|From this text]: ",
            )
        ),
        rng,
    )
    return lead + text, out


def json_answer(rng: random.Random) -> Chat:
    q, value = rng.choices((_capital, _colour, _sum, _extract), (25, 12, 18, 45))[0](rng)
    keys = list(value)
    if rng.random() < 0.12:
        q, value = q, {k: value[k] for k in (keys[-1:] if rng.random() < 0.5 else keys)}
        keys = list(value)
    answer = json.dumps(value, ensure_ascii=False)
    if rng.random() < 0.2:
        head = expand(
            rng.choice(
                (
                    f"[Answer|Reply|Respond] [only |always |][in|with] JSON with the keys {_joined(keys, rng)}.",
                    f"You [answer|reply] with a JSON object. [Keys|Its keys]: {_joined(keys, rng)}.",
                )
            ),
            rng,
        )
        return Chat([{"role": "system", "content": head}, *say(q, answer)], kind="json")
    user = vary(rng.choice(FORMS), rng, q=q, k=_joined(keys, rng))
    thinking = rng.random() < 0.06
    return Chat(
        say(
            user,
            answer,
            f"The user wants a JSON object with {' and '.join(keys)}." if thinking else "",
        ),
        thinking=True if thinking else None,
        kind="json",
    )
