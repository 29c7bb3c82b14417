"""Questions about treadle, small talk, questions out of the domain, and whole conversations."""

from __future__ import annotations

import random
from collections.abc import Callable

from . import phrases as p
from .chat import Chat, Turn
from .facts_engine import ENGINE
from .facts_plugins import PLUGINS
from .facts_use import HOW, USE
from .grammar import expand, invent, question, vary
from .outside import outside
from .tasks_sums import sums
from .tasks_world import calendar, capital, colour, copying, spelled
from .words import CITIES, FIRST_NAMES, FOODS, JOBS

__all__ = ("FACTS", "conversation", "knowledge", "say", "small_talk", "system_facts", "treadle")

HOW_ELSE = (
    "To {do}, what do I [type|run|need|enter|write]?",
    "What do I [type|run|enter|have to do|need to do] to {do}?",
    "{do}: how?",
    "{do}, how [does that work|do I start|is it done]?",
    "I'd [like|love] to {do}[.|, how?|. What now?]",
    "I would like to {do}[.|, what do I do?]",
    "[Which|What] [command|line|steps] [lets me|do I need to|can I use to|will] {do}?",
    "[Is there|Do you know] a way to {do}?",
    "[What are the steps|The steps|Steps] to {do}[?|]",
    "[Help|Assist] me [to |]{do}[.|]",
    "My [goal|plan|task] is to {do}[.|]",
    "[How does|How might] [one|somebody|a user] {do}?",
    "[Can|Could] I {do}?",
    "[Guide me|Give me instructions|Give me the steps] to {do}[.|]",
    "I [try|have|am trying] to {do}[.|, how?]",
    "What is [needed|the easiest way|the command|the best way] to {do}?",
    "[Explain|Describe|Teach me] how to {do}[.|]",
    "{do}",
    "how do i {do}",
)
FACTS = {f.key: f for f in (*USE, *PLUGINS, *ENGINE)}
ALL = tuple(FACTS.values())
NAME = "I am the treadle demo model, a small language model that comes with treadle."
CAN = "I can answer questions about treadle, do small sums, name capitals and colours, and call tools."


def say(user: str, answer: str, thought: str = "", **extra: object) -> list[dict[str, object]]:
    reply: dict[str, object] = {"role": "assistant", "content": answer, **extra}
    if thought:
        reply["reasoning_content"] = thought
    return [{"role": "user", "content": user}, reply]


def _subject(fact_names: str) -> str:
    return fact_names.split("|")[0]


def treadle(rng: random.Random) -> Turn:
    fact = rng.choice(USE if rng.random() < 0.38 else ALL)  # how to use treadle is asked most
    name = rng.choice(fact.names.split("|"))
    thought = f"The question is about {_subject(fact.names)}. I know this."
    r = rng.random()
    if r < 0.06:
        return Turn(question(rng.choice(p.MORE_ABOUT), rng, x=name), fact.more, thought)
    if fact.ask and r < (0.8 if fact in USE else 0.3):
        ask = rng.choice(fact.ask)
        if ask.startswith(HOW) and rng.random() < 0.5:
            do = expand(ask.removeprefix(HOW + " "), rng).rstrip("?")
            user = question(rng.choice(HOW_ELSE), rng, do=do)
        else:
            user = question(ask, rng)
    else:
        user = question(rng.choice(p.CONCEPT), rng, x=name)
    if rng.random() < 0.04:
        first = fact.answer.split(". ")[0].rstrip(".") + "."
        return Turn(expand(rng.choice(p.BRIEF), rng) + user, first, thought, fact.key)
    return Turn(user, fact.answer, thought, fact.key)


def small_talk(rng: random.Random) -> Turn:
    kind = rng.randrange(8)
    if kind == 0:
        return Turn(
            question(rng.choice(p.GREETING), rng),
            "Hello! How can I help you?",
            "The user greets me. I greet back.",
        )
    if kind == 1:
        return Turn(
            question(rng.choice(p.HOW_ARE_YOU), rng),
            "I am well, thank you. How can I help you?",
            "The user asks how I am.",
        )
    if kind == 2:
        return Turn(question(rng.choice(p.THANKS), rng), "You are welcome!", "The user thanks me.")
    if kind == 3:
        return Turn(question(rng.choice(p.GOODBYE), rng), "Goodbye!", "The user says goodbye.")
    if kind in (4, 5):
        return Turn(question(rng.choice(p.IDENTITY), rng), NAME, "The user asks who I am.")
    if kind == 6:
        return Turn(question(rng.choice(p.ABILITY), rng), CAN, "The user asks what I can do.")
    name = rng.choice(FIRST_NAMES) if rng.random() < 0.6 else invent(rng, 2).capitalize()
    user = vary(
        rng.choice(
            (
                "[My name is|I am|I'm|Call me|This is] {n}[.|!|]",
                "[Hi|Hello|Hey][,|!] [my name is|I am|I'm] {n}[.|!|]",
                "[They|People|My friends] call me {n}[.|!|]",
                "[Hi|Hello|Hey][,|!] {n} here[.|!|]",
                "[It is|It's] {n}[.|!|] [Hi|Hello][.|!|]",
                "You can call me {n}[.|]",
            )
        ),
        rng,
        n=name,
    )
    return Turn(user, f"Hello {name}! How can I help you?", f"The user is called {name}.")


KNOWN: tuple[tuple[Callable[[random.Random], Turn], float], ...] = (
    (treadle, 34),
    (sums, 20),
    (capital, 13),
    (colour, 8),
    (small_talk, 9),
    (outside, 22),
    (calendar, 2),
    (copying, 3),
)
MAKERS, WEIGHTS = tuple(m for m, _ in KNOWN), tuple(w for _, w in KNOWN)


def knowledge(rng: random.Random) -> Turn:
    return rng.choices(MAKERS, WEIGHTS)[0](rng)


def system_facts(rng: random.Random) -> Chat:
    """The answer stands in the prompt: a persona, a name, a thing the user said."""
    r = rng.random()
    name = rng.choice(FIRST_NAMES) if rng.random() < 0.5 else invent(rng, 2).capitalize()
    if r < 0.25:
        job = rng.choice(("assistant", "helper", "bot", "support agent", rng.choice(JOBS)))
        head = expand(
            rng.choice(
                (
                    f"You are {name}, a [friendly|helpful|polite|small] {job}.",
                    f"Your name is {name}.",
                    f"You are called {name}. [Be polite.|Help the user.|]",
                )
            ),
            rng,
        ).strip()
        if rng.random() < 0.7:
            user = question(
                rng.choice(
                    (
                        "Who are you?",
                        "What is your name?",
                        "what's your name[?|]",
                        "What are you called?",
                        "[Introduce yourself|Tell me your name][.|]",
                        "[Who am I talking to|Do you have a name]?",
                    )
                ),
                rng,
            )
            return Chat(
                [
                    {"role": "system", "content": head},
                    *say(user, f"I am {name}.", f"The system prompt says that I am {name}."),
                ]
            )
        t = knowledge(rng)
        return Chat(
            [
                {"role": "system", "content": head},
                *say(
                    t.user,
                    NAME if t.answer == "" else t.answer.replace(NAME, f"I am {name}."),
                    t.thought,
                ),
            ]
        )
    things = (
        "password",
        "wifi code",
        "room number",
        "door code",
        "secret word",
        "project name",
        "deadline",
        "meeting place",
        "office",
        "manager",
        "favourite dish",
        "order number",
        "phone number",
        "train",
        "gate",
        "table",
        "address",
        "product",
        "version",
        "team",
        "contact",
        invent(rng, 2),
        invent(rng, 3),
    )
    noun, value = (
        rng.choice(things),
        rng.choice(
            (
                invent(rng),
                str(rng.randint(1, 9999)),
                rng.choice(CITIES),
                rng.choice(FOODS),
                name,
                spelled(rng),
            )
        ),
    )
    answer = f"The {noun} is {value}."
    asks = (
        "What is the {n}?",
        "what's the {n}[?|]",
        "[Tell me|Give me|Say] the {n}[.|]",
        "Do you know the {n}?",
        "[Can|Could] you tell me the {n}?",
        "The {n}[, please|?]",
        "I need the {n}[.|]",
        "[Which|What] is the {n}?",
        "[Which|What] {n} [is it|do we have|do I need|was given|is right]?",
        "[Remind me of|Look up|Recall|Name|Repeat] the {n}[.|]",
        "[I forgot|I need to know|I am looking for] the {n}[.|]",
        "[Can|Could|Would] you [say|repeat|recall|name] the {n}?",
        "{n}[?|, please|]",
    )
    ask = vary(rng.choice(asks), rng, n=noun)
    if r < 0.55:
        other, thing = rng.choice([t for t in things if t != noun]), spelled(rng)
        lines = [f"The {noun} is {value}."] + (
            [f"The {other} is {thing}."] if rng.random() < 0.6 else []
        )
        rng.shuffle(lines)
        head = (rng.choice(p.SYSTEM) + " " if rng.random() < 0.5 else "") + " ".join(lines)
        if rng.random() < 0.15:
            missing = rng.choice([t for t in things if t not in (noun, other)])
            return Chat(
                [
                    {"role": "system", "content": head},
                    *say(
                        vary(rng.choice(asks), rng, n=missing),
                        f"I don't know the {missing}.",
                        f"The {missing} is not given.",
                    ),
                ]
            )
        return Chat(
            [
                {"role": "system", "content": head},
                *say(ask, answer, f"The {noun} is given: {value}."),
            ]
        )
    if r < 0.72:
        statement = vary(
            rng.choice(
                (
                    "[Remember|Note][:| that] the {n} is {v}.",
                    "The {n} is {v}.",
                    "[Please r|R]emember this: the {n} is {v}.",
                )
            ),
            rng,
            n=noun,
            v=value,
        )
        first = say(statement, "I will remember that.")
        filler = (
            [m for t in [knowledge(rng)] for m in say(t.user, t.answer)]
            if rng.random() < 0.4
            else []
        )
        return Chat([*first, *filler, *say(ask, answer, f"The user told me the {noun}: {value}.")])
    name_question = question(
        rng.choice(
            (
                "What is my name?",
                "what's my name[?|]",
                "Who am I?",
                "Do you [know|remember] my name?",
                "[Tell me|Say] my name[.|]",
                "[What|How] am I called?",
            )
        ),
        rng,
    )
    if r < 0.80:
        return Chat(
            say(name_question, "I don't know your name.", "The user has not told me a name.")
        )
    hello = vary(
        rng.choice(
            (
                "[My name is|I am|I'm] {n}[.|!|]",
                "[Hi|Hello][,|!] [my name is|I am|I'm|this is] {n}[.|!|]",
            )
        ),
        rng,
        n=name,
    )
    filler = [
        m for t in [knowledge(rng) for _ in range(rng.randint(0, 2))] for m in say(t.user, t.answer)
    ]
    return Chat(
        [
            *say(hello, f"Hello {name}! How can I help you?"),
            *filler,
            *say(name_question, f"Your name is {name}.", f"The user said the name {name}."),
        ]
    )


def _follow_up(rng: random.Random, turn: Turn) -> Turn | None:
    """A question that only makes sense after ``turn``."""
    from .facts_world import CAPITALS

    if turn.key in FACTS:
        fact = FACTS[turn.key]
        return Turn(
            question(rng.choice(p.MORE), rng),
            fact.more,
            f"The user wants to know more about {_subject(fact.names)}.",
        )
    if turn.key in CAPITALS:
        other = rng.choice(tuple(CAPITALS))
        user = question(
            rng.choice(
                (
                    "[And|and] [of|for|in] {x}?",
                    "And {x}?",
                    "What about {x}?",
                    "How about {x}?",
                    "[and|And] the one of {x}?",
                    "{x}?",
                    "now {x}",
                )
            ),
            rng,
            x=other,
        )
        return Turn(
            user,
            f"The capital of {other} is {CAPITALS[other]}.",
            f"The user asks for another capital, of {other}. It is {CAPITALS[other]}.",
        )
    return None


def conversation(rng: random.Random, *, long: bool = False) -> Chat:
    """Several turns, some of them linked."""
    messages: list[dict[str, object]] = []
    if rng.random() < 0.3:
        messages.append({"role": "system", "content": rng.choice(p.SYSTEM)})
    thinking = rng.random() < 0.12
    for _ in range(rng.randint(12, 30) if long else rng.randint(2, 5)):
        turn = knowledge(rng)
        messages += say(turn.user, turn.answer, turn.thought if thinking else "")
        follow = _follow_up(rng, turn)
        if follow and rng.random() < 0.6:
            messages += say(follow.user, follow.answer, follow.thought if thinking else "")
    if thinking:  # the template drops earlier reasoning, so only the last turn shows how to think
        for m in messages[:-1]:
            if m["role"] == "assistant":
                m["train"] = False
    return Chat(messages, thinking=True if thinking else None, kind="conversation")
