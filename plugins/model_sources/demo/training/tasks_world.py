"""Capitals, colours, the calendar, copying."""

from __future__ import annotations

import random

from . import phrases as p
from .chat import Turn
from .facts_world import CAPITALS, COLOURS, DAYS, MIXES, MONTHS
from .grammar import invent, question, vary, word
from .words import CITIES, FIRST_NAMES, FOODS, ITEMS

__all__ = ("calendar", "capital", "colour", "copying", "spelled")

NAMES = tuple(CAPITALS)
BY_CAPITAL = {c: k for k, c in CAPITALS.items()}


def _bare(country: str) -> str:
    return country.removeprefix("the ")


def capital(rng: random.Random) -> Turn:
    country = rng.choice(NAMES)
    city = CAPITALS[country]
    display_name = country if rng.random() < 0.8 else _bare(country)
    capitalized = country[0].upper() + country[1:]
    r = rng.random()
    if r < 0.08:
        fake = invent(rng, rng.choice((2, 3))).capitalize() + rng.choice(("", "ia", "land", "stan"))
        user = question(rng.choice(p.CAPITAL), rng, x=fake)
        return Turn(
            user,
            "I don't know that country.",
            "I have never heard of this country, so I should not guess.",
        )
    if r < 0.25:
        user = question(rng.choice(p.CAPITAL_BACK), rng, c=city)
        return Turn(
            user,
            f"{city} is the capital of {country}.",
            f"{city} is a capital city. Its country is {country}.",
        )
    if r < 0.37:
        is_right = rng.random() < 0.5
        named_city = city if is_right else rng.choice([c for c in CAPITALS.values() if c != city])
        user = question(rng.choice(p.CAPITAL_CHECK), rng, c=named_city, x=display_name)
        start = "Yes" if is_right else "No"
        return Turn(
            user,
            f"{start}, the capital of {country} is {city}.",
            f"The capital of {country} is {city}. The question says {named_city}.",
        )
    user = question(rng.choice(p.CAPITAL), rng, x=display_name)
    answer = (
        f"The capital of {country} is {city}."
        if rng.random() < 0.97
        else f"{city} is the capital of {capitalized}."
    )
    return Turn(user, answer, f"The country is {country}. Its capital is {city}.", country)


def colour(rng: random.Random) -> Turn:
    if rng.random() < 0.35:
        (a, b), mix = rng.choice(list(MIXES.items()))
        if rng.random() < 0.5:
            a, b = b, a
        return Turn(
            question(rng.choice(p.MIX), rng, a=a, b=b),
            f"{a.capitalize()} and {b} make {mix}.",
            f"I mix {a} with {b}. That gives {mix}.",
        )
    thing, shade = rng.choice(list(COLOURS.items()))
    display_name = (
        thing if rng.random() < 0.75 else thing.split(" ", 1)[-1] if " " in thing else thing
    )
    capitalized = thing[0].upper() + thing[1:]
    return Turn(
        question(rng.choice(p.COLOUR), rng, x=display_name),
        f"{capitalized} is {shade}.",
        f"The question is about the colour of {thing}. It is {shade}.",
    )


def calendar(rng: random.Random) -> Turn:
    names, unit = rng.choice(((DAYS, "day"), (MONTHS, "month")))
    i = rng.randrange(len(names))
    n = len(names)
    if rng.random() < 0.5:
        user = question(
            rng.choice(
                (
                    f"[What|Which] {unit} [comes|is] after {{x}}?",
                    "What [comes|is] after {x}?",
                    f"The {unit} after {{x}}[?|]",
                    f"[Name|Tell me] the {unit} after {{x}}[.|]",
                )
            ),
            rng,
            x=names[i],
        )
        return Turn(
            user,
            f"{names[(i + 1) % n]} comes after {names[i]}.",
            f"I go through the {unit}s: {names[i]}, then {names[(i + 1) % n]}.",
        )
    user = question(
        rng.choice(
            (
                f"[What|Which] {unit} [comes|is] before {{x}}?",
                "What [comes|is] before {x}?",
                f"The {unit} before {{x}}[?|]",
                f"[Name|Tell me] the {unit} before {{x}}[.|]",
            )
        ),
        rng,
        x=names[i],
    )
    return Turn(
        user,
        f"{names[i - 1]} comes before {names[i]}.",
        f"I go through the {unit}s: {names[i - 1]}, then {names[i]}.",
    )


def spelled(rng: random.Random) -> str:
    """A short text made of words that need not mean anything, for tasks that copy."""
    pool = (
        lambda: invent(rng),
        lambda: rng.choice(FIRST_NAMES),
        lambda: rng.choice(CITIES),
        lambda: rng.choice(ITEMS),
        lambda: rng.choice(FOODS),
        lambda: word(rng),
        lambda: word(rng),
        lambda: str(rng.randint(0, 9999)),
        lambda: invent(rng).capitalize(),
        lambda: rng.choice(("the", "a", "my", "and", "is", "in", "on", "with")),
    )
    return " ".join(rng.choice(pool)() for _ in range(rng.randint(1, 6)))


def copying(rng: random.Random) -> Turn:
    text = spelled(rng)
    ask = rng.choice(
        (
            "[Repeat|Say|Echo][:|] {x}",
            "[Please |]repeat after me: {x}",
            "[Repeat|Say] [this|the following][:|] {x}",
            "[Write|Print|Copy] exactly[:|] {x}",
            'Say "{x}"[.|]',
            "Repeat the words {x}",
        )
    )
    return Turn(vary(ask, rng, x=text), text, "I only have to repeat the words.")
