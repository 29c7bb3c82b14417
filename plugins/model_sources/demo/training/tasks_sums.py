"""Sums: symbols, words and little stories."""

from __future__ import annotations

import random

from .chat import Turn
from .common import NOUNS
from .grammar import expand, fill, vary
from .words import FIRST_NAMES, ITEMS

__all__ = ("number_words", "sums")

ONES = (  # noqa: SIM905
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
).split()
TENS = ["_", "_", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def number_words(n: int) -> str:
    if n < 20:
        return ONES[n]
    if n < 100:
        return TENS[n // 10] + (f"-{ONES[n % 10]}" if n % 10 else "")
    rest = f" {number_words(n % 100)}" if n % 100 else ""
    return f"{ONES[n // 100]} hundred{rest}"


PLAIN = (
    "What is {e}?",
    "what's {e}[?|]",
    "{e}",
    "{e} =",
    "{e} = ?",
    "{e}?",
    "[Calculate|Compute|Solve|Evaluate] {e}[.|]",
    "[How much|What] is {e}?",
    "[What does|How much does] {e} [make|equal|give]?",
    "[Can|Could] you [calculate|compute|solve|work out] {e}?",
    "[Tell me|Give me] the [result|answer|value] of {e}[.|]",
    "[The result|The answer|The value] of {e}[?|]",
    "I need [to know |]{e}[.|]",
    "Do you know [what |]{e}[ is|]?",
    "Please [do|work out|add up] {e}[.|]",
    "{e} is[| ...| what]?",
    "[Find|Get|Determine|Figure out|Do] {e}[.|]",
    "[My|The] [task|exercise|question|sum] is {e}[.|]",
    "[How about|What about|And] {e}?",
    "[Would you|Can you|Could you] [figure out|do|tell me|find] {e}?",
    "[I wonder|I want to know|I forgot|Guess] [how much|what] {e} is[.|?|]",
    "[{e}|{e} is how much][, please|, how much|]?",
    "[Sum|Math|Maths|Exercise|Question]: {e}",
    "[What number|Which number|How many] is {e}?",
    "{e} [makes|gives|equals][?|]",
    "[Do you know|Tell me|Say] how much {e} is[?|.|]",
)
WORDED = {
    "+": (
        "{a} plus {b}",
        "{a} and {b} together",
        "the sum of {a} and {b}",
        "{a} added to {b}",
        "{a} + {b}",
        "{a}+{b}",
        "{a} more than {b}",
        "{a} and {b} more",
        "{a} increased by {b}",
        "{b} on top of {a}",
        "{a} joined by {b}",
        "{a} with {b} added",
        "the total of {a} and {b}",
    ),
    "-": (
        "{a} minus {b}",
        "{a} take away {b}",
        "{b} less than {a}",
        "{b} subtracted from {a}",
        "{a} - {b}",
        "{a}-{b}",
        "the difference between {a} and {b}",
        "{a} without {b}",
        "{a} reduced by {b}",
        "{b} fewer than {a}",
        "{a} down by {b}",
        "{a} less {b}",
        "{a} if you remove {b}",
        "{a} after losing {b}",
        "{a} when {b} is taken off",
    ),
    "*": (
        "{a} times {b}",
        "{a} multiplied by {b}",
        "the product of {a} and {b}",
        "{a} * {b}",
        "{a} x {b}",
        "{a} × {b}",
        "{a}*{b}",
        "{a}x{b}",
        "{a} multiplied with {b}",
        "{a} groups of {b}",
        "{b} times {a}",
        "{b} lots of {a}",
    ),
    "/": ("{a} divided by {b}", "{a} / {b}", "{a}/{b}", "{a} over {b}", "{a} ÷ {b}"),
}
COMMAND = {
    "+": (
        "Add {a} and {b}[.|]",
        "Add {a} to {b}[.|]",
        "Sum {a} and {b}[.|]",
        "What do you get [if|when] you add {a} and {b}?",
        "[I|We] add {b} to {a}[.|,] what [is it|do I have|comes out]?",
        "[Begin|Start] [with|at] {a}[,|and] add {b}[.|]",
        "{a}, then {b} more[.|?] [Total?|What is the total?|]",
    ),
    "-": (
        "Subtract {b} from {a}[.|]",
        "Take {b} [away |]from {a}[.|]",
        "What [remains|is left] [if|when] you take {b} from {a}?",
        "[I|We] [remove|take] {b} from {a}[.|,] what [is left|remains|do I have]?",
        "[Begin|Start] [with|at] {a}[,| and] [subtract|take away|remove] {b}[.|]",
        "[Remove|Deduct|Cut] {b} from {a}[.|]",
    ),
    "*": (
        "Multiply {a} [by|with|and] {b}[.|]",
        "What do you get [if|when] you multiply {a} by {b}?",
        "[I|We] multiply {a} by {b}[.|,] what [is it|comes out]?",
        "Take {a} {b} times[.|]",
    ),
    "/": ("Divide {a} by {b}[.|]", "What do you get [if|when] you divide {a} by {b}?"),
}
STORIES = (
    (
        "*",
        "{a} [friends|workers|boys|girls|dogs|students] [have|carry|get|hold|bring] {b} {i}s each. How many {i}s [is that|are there|in total|in all]?",
        "that is {r} {i}s",
    ),
    (
        "*",
        "Every [day|week|hour] {n} [makes|reads|sells|packs] {b} {i}s. How many [{i}s |][in|after] {a} [days|weeks|hours]?",
        "that is {r} {i}s",
    ),
    (
        "+",
        "[In|At] the [first|old|big] [shop|room|bag] [are|were] {a} {i}s, in the [second|new|small] one {b}. [How many|What is the total|How many in all]?",
        "there are {r} {i}s",
    ),
    (
        "+",
        "{n} has {a} {i}s and [buys|gets|finds|is given|receives] {b} more. How many {i}s does {n} have[| now| in total]?",
        "{n} has {r} {i}s",
    ),
    (
        "+",
        "There are {a} {i}s in one box and {b} in another. How many [{i}s |]are there [together|in total|in all]?",
        "there are {r} {i}s",
    ),
    (
        "+",
        "I have {a} {i}s. I [buy|find|get] {b} more. How many [{i}s |]do I have[| now]?",
        "you have {r} {i}s",
    ),
    (
        "-",
        "{n} has {a} {i}s and [gives away|loses|sells|breaks|uses] {b}[| of them]. How many [{i}s |]are left?",
        "{r} {i}s are left",
    ),
    (
        "-",
        "I had {a} {i}s and [gave|sold|lent] {b} [away|to {n}]. How many [{i}s |]do I have [left|now]?",
        "you have {r} {i}s left",
    ),
    (
        "+",
        "{n} [owns|keeps|holds|collects] {a} {i}s. [{m}|A friend|His brother|Her sister|The teacher] [adds|gives|sends|hands over] {b} more. How many {i}s [does {n} have|are there|is that]?",
        "{n} has {r} {i}s",
    ),
    (
        "+",
        "[On|Under|Near] the table [are|lie] {a} {i}s, [on|under|near] the bed {b}. How many {i}s [are there|is that|do we have]?",
        "there are {r} {i}s",
    ),
    (
        "+",
        "{a} {i}s are [red|old|here], {b} [{i}s |]are [blue|new|there]. How many [{i}s |][are there|in total|together]?",
        "there are {r} {i}s",
    ),
    (
        "+",
        "[Yesterday|On Monday|In May] {n} [made|sold|saw] {a} {i}s, [today|on Tuesday|in June] {b}. How many [in all|together|is that]?",
        "that is {r} {i}s",
    ),
    (
        "-",
        "[Of|Out of] {a} {i}s, {b} [break|are sold|are lost|are gone|disappear]. How many [{i}s |][are left|remain|stay]?",
        "{r} {i}s are left",
    ),
    (
        "-",
        "{n} [starts with|owned|collected] {a} {i}s. {m} [takes|steals|borrows|eats] {b}. How many [{i}s |][are left|remain|does {n} still have]?",
        "{r} {i}s are left",
    ),
    (
        "-",
        "[A|The] [box|shop|bag] [has|holds|had] {a} {i}s. [I|We|They|You] [take|remove|use|buy] {b}[| of them]. How many [{i}s |][are left|remain|are still there]?",
        "{r} {i}s are left",
    ),
    (
        "*",
        "[In|On] {a} [shelves|rows|rooms|cars|tables] [are|there are] {b} {i}s each. How many {i}s [in total|are there|is that|are there in all]?",
        "that is {r} {i}s",
    ),
    (
        "*",
        "[There are|I have|We see|{n} has] {a} [bowls|crates|packs|rows], [each with|and each holds|each has] {b} {i}s. How many {i}s [are there|is that|in all]?",
        "that is {r} {i}s",
    ),
    (
        "*",
        "[A|One|Each] {i} [is|costs] {a} [dollars|euros|coins]. [What is the price of|What do I pay for|How much are] {b}[| {i}s]?",
        "{b} {i}s cost {r}",
    ),
    (
        "*",
        "{n} buys {a} boxes with {b} {i}s [each|in each]. How many {i}s [is that|are there|does {n} have]?",
        "that is {r} {i}s",
    ),
    (
        "*",
        "[One|A|Each] {i} costs {a} [dollars|euros|coins]. [How much do|What do] {b} {i}s cost?",
        "{b} {i}s cost {r}",
    ),
)
SIGNS = {"+": "+", "-": "-", "*": "×", "/": "/"}


def _operands(op: str, rng: random.Random) -> tuple[int, int, int]:
    if op == "*":
        top = rng.choice(((12, 12), (12, 12), (99, 9), (9, 99), (20, 20)))
        a, b = rng.randint(0, top[0]), rng.randint(0, top[1])
        return a, b, a * b
    if op == "/":
        b, r = rng.randint(1, 12), rng.randint(0, 12)
        return b * r, b, r
    top = rng.choice((9, 20, 99, 99, 99, 99, 99, 999))
    a, b = rng.randint(0, top), rng.randint(0, rng.choice((top, top, 9)))
    if op == "+":
        return a, b, a + b
    if a < b and rng.random() < 0.85:
        a, b = b, a
    return a, b, a - b


def _thought(op: str, a: int, b: int, r: int) -> str:
    if op == "+" and 10 <= max(a, b) <= 99 and min(a, b) >= 0:
        ones, tens = a % 10 + b % 10, a // 10 + b // 10
        carry = ones // 10
        tail = (
            f" The tens give {a // 10} + {b // 10}"
            + (f" + {carry}" if carry else "")
            + f" = {tens + carry}."
        )
        return (
            f"I add the ones: {a % 10} + {b % 10} = {ones}"
            + (", carry 1." if carry else ".")
            + tail
            + f" So {a} + {b} = {r}."
        )
    if op == "-" and a >= b and b >= 10:
        tens = b // 10 * 10
        return f"I take away the tens first: {a} - {tens} = {a - tens}. Then {a - tens} - {b % 10} = {r}. So {a} - {b} = {r}."
    if op == "*" and max(a, b) > 10 and min(a, b) > 1:
        big, small = max(a, b), min(a, b)
        t, o = big // 10 * 10, big % 10
        return f"I split {big} into {t} and {o}. {t} × {small} = {t * small} and {o} × {small} = {o * small}. Together that is {r}."
    return f"This is a small sum: {a} {SIGNS[op]} {b} = {r}."


def sums(rng: random.Random) -> Turn:
    r = rng.random()
    if r < 0.03:  # beyond what a model of this size can do
        a, b, op = rng.randint(10000, 9999999), rng.randint(10000, 9999999), rng.choice("+-*")
        user = vary(rng.choice(PLAIN), rng, e=f"{a} {op} {b}")
        return Turn(
            user,
            "I don't know. I can only do small sums.",
            "These numbers are too large for me, so I should say so.",
        )
    if r < 0.10:
        a, b, c = (rng.randint(0, rng.choice((9, 20, 50))) for _ in range(3))
        t = a + b + c
        return Turn(
            vary(
                rng.choice(PLAIN), rng, e=rng.choice((f"{a} + {b} + {c}", f"{a} plus {b} plus {c}"))
            ),
            f"{a} + {b} + {c} = {t}.",
            f"First {a} + {b} = {a + b}. Then {a + b} + {c} = {t}.",
        )
    if r < 0.28:
        op, ask, says = rng.choice(STORIES)
        a, b, res = _operands(op, rng)
        while res < 0:
            a, b, res = _operands(op, rng)
        slots = {
            "n": rng.choice(FIRST_NAMES),
            "m": rng.choice(FIRST_NAMES),
            "i": rng.choice(
                (
                    *ITEMS,
                    "apple",
                    "egg",
                    "pencil",
                    "card",
                    "coin",
                    "stamp",
                    "pen",
                    "ticket",
                    "nut",
                    rng.choice(NOUNS),
                )
            ),
            "a": str(a),
            "b": str(b),
            "r": str(res),
        }
        user = fill(expand(ask, rng), slots)
        return Turn(
            user, f"{a} {SIGNS[op]} {b} = {res}, so {fill(says, slots)}.", _thought(op, a, b, res)
        )
    op = rng.choice("+++---***/")
    a, b, res = _operands(op, rng)
    words = rng.random() < 0.15
    slots = {
        "a": number_words(a) if words and a < 1000 else str(a),
        "b": number_words(b) if words and b < 1000 else str(b),
    }
    if op == "-" and res < 0:
        e = f"{a} - {b}"
        user = vary(rng.choice(PLAIN), rng, e=e)
    elif rng.random() < 0.2:
        user = vary(rng.choice(COMMAND[op]), rng, **slots)
    else:
        e = rng.choice(WORDED[op])
        user = vary(rng.choice(PLAIN).replace("{e}", e), rng, **slots)
    return Turn(user, f"{a} {SIGNS[op]} {b} = {res}.", _thought(op, a, b, res))
