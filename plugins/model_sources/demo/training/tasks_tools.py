"""Conversations with tools: call one, use its result, or leave it alone.

Names, descriptions, parameters and values are drawn at random, so that the only way to be right
is to read the schema and to copy from the question.
"""

from __future__ import annotations

import json
import random
from typing import Any

from . import phrases as p
from .chat import Chat, Turn
from .common import NOUNS as COMMON
from .common import PARAMS, TOOL_VERBS
from .facts_world import CAPITALS
from .grammar import expand, fill, invent, vary
from .tasks_talk import knowledge, say
from .tool_kinds import KINDS, ToolKind, city, clock, date, person, words
from .words import SUBJECTS, THINGS

__all__ = ("tool_answer", "tool_call", "tool_unused")

Schema = dict[str, Any]
VALUES = (
    (words, "string"),
    (words, "string"),
    (city, "string"),
    (person, "string"),
    (lambda r: r.randint(1, 99999), "integer"),
    (lambda r: r.randint(1, 99), "integer"),
    (clock, "string"),
    (date, "string"),
    (lambda r: f"{invent(r).upper()}-{r.randint(1, 99)}", "string"),
    (lambda r: r.choice(COMMON), "string"),
    (lambda r: r.choice(tuple(CAPITALS)).removeprefix("the "), "string"),
)
CONDITIONS = (
    "sunny",
    "cloudy",
    "rainy",
    "windy",
    "foggy",
    "snowy",
    "clear",
    "stormy",
    "dry",
    "humid",
)
NOUNS = tuple(s.replace(" ", "_").replace("the_", "").lower() for s in SUBJECTS + THINGS) + tuple(
    [
        "population",
        "currency",
        "language",
        "president",
        "area",
        "flag",
        "climate",
        "opening_hours",
        "definition",
        "meaning",
        "synonym",
        "lyrics",
        "biography",
        "origin",
        "nationality",
        "phone_number",
        "birthday",
        "ingredients",
        "release_date",
        "exchange_rate",
        "air_quality",
        "travel_time",
        "status",
        "price",
        "owner",
        "size",
        "colour",
        "score",
        "balance",
        "history",
        "count",
        "level",
        "rating",
        "address",
        "weight",
        "schedule",
        "menu",
        "stock",
        "speed",
    ]
)


def _schema(
    name: str, about: str, params: list[tuple[str, str, str]], rng: random.Random
) -> Schema:
    described = rng.random() < 0.6
    properties = {
        n: {"type": kind, "description": text} if described and text else {"type": kind}
        for n, kind, text in params
    }
    function = {
        "name": name,
        "description": about,
        "parameters": {
            "type": "object",
            "properties": properties,
            "required": [n for n, _, _ in params],
        },
    }
    if rng.random() < 0.1:
        del function["parameters"]["required"]  # type: ignore[attr-defined]
    return {"type": "function", "function": function}


class Use:
    """One tool with one intended call."""

    def __init__(self, rng: random.Random, kind: ToolKind | None = None) -> None:
        if kind is None and rng.random() < 0.5:
            self._invented(rng)
            return
        kind = kind or rng.choice(KINDS)
        self.kind = kind
        self.name = (
            rng.choice(kind.names.split("|"))
            if rng.random() < 0.85
            else f"{invent(rng)}_{kind.names.split('|')[0]}"
        )
        names = []
        for param in kind.params:
            free = [n for n in param.names.split("|") if n not in names]
            names.append(rng.choice(free))
        self.values = [param.value(rng) for param in kind.params]
        self.arguments = dict(zip(names, self.values, strict=True))
        self.schema = _schema(
            self.name,
            expand(kind.about, rng),
            [(n, param.type, param.about) for n, param in zip(names, kind.params, strict=True)],
            rng,
        )
        self.user = vary(
            rng.choice(kind.asks), rng, **{str(i): str(v) for i, v in enumerate(self.values)}
        )

    def _invented(self, rng: random.Random) -> None:
        """A tool that no other sample has: only its schema tells what it is for."""
        r = rng.random()
        noun = (
            rng.choice(NOUNS[-40:] if rng.random() < 0.5 else NOUNS)
            if r < 0.45
            else f"{rng.choice(COMMON)}_{rng.choice(COMMON)}"
            if r < 0.65
            else rng.choice(COMMON)
            if r < 0.85
            else invent(rng)
        )
        spoken, verb = noun.replace("_", " "), rng.choice(TOOL_VERBS)
        self.name = rng.choice(
            (f"{verb}_{noun}",) * 4 + (verb + noun.title().replace("_", ""), noun)
        )
        value_kinds = [rng.choice(VALUES) for _ in range(rng.choice((1, 1, 1, 2, 2, 3)))]
        names = rng.sample(PARAMS, len(value_kinds))
        if rng.random() < 0.3:
            names[0] = rng.choice((*COMMON, invent(rng)))
        names = list(dict.fromkeys(names))
        value_kinds = value_kinds[: len(names)]
        self.values = [make(rng) for make, _ in value_kinds]
        self.arguments = dict(zip(names, self.values, strict=True))
        about = expand(
            rng.choice(
                (
                    "{V} [the|a] {s}[.|]",
                    "[Get|Return|Look up] the {s}[| of something][.|]",
                    "{V} [the|a] {s} [by|for|of] [a|the] {p}[.|]",
                    "{V} {s}s[.|]",
                )
            ),
            rng,
        )
        about = fill(about, {"V": verb.capitalize(), "s": spoken, "p": names[0].replace("_", " ")})
        self.schema = _schema(
            self.name,
            about,
            [(n, kind, "") for n, (_, kind) in zip(names, value_kinds, strict=True)],
            rng,
        )
        arguments = [
            f"{n.replace('_', ' ')} {v}" if rng.random() < 0.7 else f"{v} as {n.replace('_', ' ')}"
            for n, v in self.arguments.items()
        ]
        argument_text = (
            " and ".join(arguments)
            if rng.random() < 0.6
            else ", ".join(f"{n}={v}" for n, v in self.arguments.items())
        )
        asks = [
            "[Call|Use|Run] {f} with {w}[.|]",
            "{V} the {s} with {w}[.|]",
            "{V} [a|the] {s}[,|:] {w}[.|]",
            "What is the {s} [with|for] {w}?",
            "[Please|Now] {v_} the {s} [with|for] {w}[.|]",
            "{s} [for|with] {w}[?|, please]",
            "[Can|Could] you {v_} the {s} with {w}?",
        ]
        if len(self.values) == 1:
            asks = [
                *asks[:3],
                "What is the {s} [of|in|for|at] {v}?",
                "{V} the {s} [of|for|from|in] {v}[.|]",
                "{s} [of|for|in] {v}[?|]",
                "{V} {s} {v}[.|]",
                "{V} the {s} {v}[.|]",
                "[When|Where|How|Which] is the [next |]{s} [of|from|for|in|at] {v}?",
                "[Can|Could] you {v_} the {s} [of|for|from] {v}?",
                "[I need|Show me|Tell me|Give me|I want] the {s} [of|for|in] {v}[.|]",
                "[How|What] about the {s} [of|in] {v}?",
                "[Please|Now] {v_} {s} {v}[.|]",
                "{V} the {p} {v}[.|]",
            ]
        self.kind = None
        self.user = vary(
            rng.choice(asks),
            rng,
            f=self.name,
            w=argument_text,
            s=spoken,
            V=verb.capitalize(),
            v_=verb,
            p=names[0].replace("_", " "),
            v=str(self.values[0]),
        )

    def call(self) -> dict[str, Any]:
        return {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}

    def result(self, rng: random.Random) -> tuple[str, str]:
        """What the tool returns, and the answer that uses it."""
        r = rng.random()
        if r < 0.08:
            reason = expand(
                "[not found|timeout|no access|invalid argument|service unavailable|unknown "
                + rng.choice(list(self.arguments))
                + "]",
                rng,
            )
            return json.dumps({"error": reason}), f"The tool failed: {reason}."
        if self.kind is None or r < 0.3:
            if rng.random() < 0.3:
                value = words(rng)
                return value, f"The result is: {value}."
            fields = {
                rng.choice(
                    (
                        "result",
                        "value",
                        "status",
                        "name",
                        "total",
                        "answer",
                        "price",
                        "owner",
                        "level",
                        invent(rng),
                    )
                ): rng.choice((words(rng), rng.randint(0, 9999), invent(rng)))
                for _ in range(rng.choice((1, 1, 2, 2, 3)))
            }
            return (
                json.dumps(fields),
                f"{'; '.join(f'The {k} is {v}' if i == 0 else f'the {k} is {v}' for i, (k, v) in enumerate(fields.items()))}.",
            )
        i = rng.randrange(len(self.kind.results))
        word = (
            rng.choice(CONDITIONS)
            if "weather" in self.kind.names and rng.random() < 0.8
            else words(rng)
        )
        slots = {str(k): str(v) for k, v in enumerate(self.values)} | {
            "n": str(
                rng.randint(-20, 40) if "weather" in self.kind.names else rng.randint(0, 99999)
            ),
            "w": word,
            "W": invent(rng).capitalize(),
            "t": clock(rng),
        }
        return fill(self.kind.results[i], slots), fill(self.kind.says[i], slots)


def _offer(rng: random.Random, uses: list[Use], extra: int) -> list[Schema]:
    tools = [u.schema for u in uses]
    names = {t["function"]["name"] for t in tools}
    kinds = {id(u.kind) for u in uses if u.kind}
    for _ in range(extra):
        other = Use(rng)
        if other.name not in names and id(other.kind) not in kinds:
            tools.append(other.schema)
            names.add(other.name)
    rng.shuffle(tools)
    return tools


def _start(rng: random.Random) -> list[dict[str, Any]]:
    return [{"role": "system", "content": rng.choice(p.SYSTEM)}] if rng.random() < 0.3 else []


def _extra(rng: random.Random) -> int:
    return rng.choices((0, 1, 2, 3), (45, 30, 17, 8))[0]


def _call_message(uses: list[Use], thought: str) -> dict[str, Any]:
    m: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [u.call() for u in uses]}
    if thought:
        m["reasoning_content"] = thought
    return m


def _uses(rng: random.Random) -> tuple[list[Use], str, list[Schema]]:
    use = Use(rng)
    tools = _offer(rng, [use], _extra(rng))
    if (
        use.kind
        and len(use.values) == 1
        and use.kind.params[0].type == "string"
        and rng.random() < 0.12
    ):
        twin = Use.__new__(Use)  # the same tool called twice, for two values
        value = use.kind.params[0].value(rng)
        twin.kind, twin.name, twin.schema, twin.values = use.kind, use.name, use.schema, [value]
        twin.arguments = {next(iter(use.arguments)): value}
        return (
            [use, twin],
            vary(rng.choice(use.kind.asks), rng, **{"0": f"{use.values[0]} and {value}"}),
            tools,
        )
    return [use], use.user, tools


def _thought(uses: list[Use]) -> str:
    arguments = ", ".join(f"{k} {v}" for k, v in uses[0].arguments.items())
    return f"The tool {uses[0].name} can answer this. I call it with {arguments}."


def tool_call(rng: random.Random) -> Chat:
    uses, user, tools = _uses(rng)
    thinking = rng.random() < 0.08
    before = (
        [
            m
            for t in [knowledge(rng) for _ in range(rng.choice((1, 1, 2)))]
            for m in say(t.user, t.answer)
        ]
        if rng.random() < 0.12 and not thinking
        else []
    )
    if (
        rng.random() < 0.05
        and len(uses) == 1
        and uses[0].kind
        and len(uses[0].values) == 1
        and "0" in "".join(uses[0].kind.asks)
    ):
        return _missing(rng, uses[0], tools)
    return Chat(
        [
            *_start(rng),
            *before,
            {"role": "user", "content": user},
            _call_message(uses, _thought(uses) if thinking else ""),
        ],
        tools,
        True if thinking else None,
        "tool_call",
    )


def _missing(rng: random.Random, use: Use, tools: list[Schema]) -> Chat:
    name = next(iter(use.arguments))
    user = vary(
        rng.choice(
            (
                "[Use|Call|Run] {f}[.|]",
                "[Please |][use|call] the tool {f}[.|]",
                "Can you [use|call] {f}?",
            )
        ),
        rng,
        f=use.name,
    )
    return Chat(
        [*_start(rng), *say(user, f"Please tell me the {name.replace('_', ' ')}.")],
        tools,
        kind="tool_missing",
    )


def tool_answer(rng: random.Random) -> Chat:
    uses, user, tools = _uses(rng)
    thinking = rng.random() < 0.06
    results = [u.result(rng) for u in uses]
    messages = [
        *_start(rng),
        {"role": "user", "content": user},
        _call_message(uses, _thought(uses) if thinking else ""),
    ]
    messages += [{"role": "tool", "content": content} for content, _ in results]
    reply: dict[str, Any] = {"role": "assistant", "content": " ".join(a for _, a in results)}
    if thinking:
        reply["reasoning_content"] = "The tool has answered. I report its result."
    messages.append(reply)
    if rng.random() < 0.15 and not thinking:
        if rng.random() < 0.5:
            t: Turn = knowledge(rng)
            messages += say(t.user, t.answer)
        else:
            again = Use(rng, uses[0].kind) if uses[0].kind else None
            if again:
                again.name, again.arguments = (
                    uses[0].name,
                    dict(zip(uses[0].arguments, again.values, strict=True)),
                )
                messages += [{"role": "user", "content": again.user}, _call_message([again], "")]
    return Chat(messages, tools, True if thinking else None, "tool_answer")


ARITHMETIC = tuple(KINDS[1].names.split("|"))


def tool_unused(rng: random.Random) -> Chat:
    tools = [t for t in _offer(rng, [], 1 + _extra(rng)) if t["function"]["name"] not in ARITHMETIC]
    # no tool that could answer: the question is from the domain, or from outside of every tool
    turn = knowledge(rng)
    while any(
        w in turn.user.lower()
        for t in tools
        for w in t["function"]["name"].lower().split("_")
        if len(w) > 3
    ):
        turn = knowledge(rng)
    thinking = rng.random() < 0.08
    return Chat(
        [*_start(rng), *say(turn.user, turn.answer, turn.thought if thinking else "")],
        tools,
        True if thinking else None,
        "tool_unused",
    )
