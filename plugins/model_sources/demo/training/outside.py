"""Questions that the demo model cannot answer, so that it learns to say so.

The topics are many and some words are invented: what counts is that nothing in the question
belongs to the domain, not that the topic was seen.
"""

# fmt: off
# ruff: noqa: SIM905
# One entry is one line, and a list of words is a text: so they can be compared and edited.
from __future__ import annotations

import random

from . import phrases as p
from .chat import Turn
from .common import ADJECTIVES, NOUNS
from .facts_world import CAPITALS, COLOURS
from .grammar import expand, fill, invent, roughen, word
from .words import CITIES, FAMOUS, FIRST_NAMES, FOODS, ITEMS, JOBS, SUBJECTS, THINGS, VERBS

__all__ = ("REFUSALS", "outside")

REFUSALS = (
    "I don't know that. I can talk about treadle, small sums, capitals and colours.",
    "I don't know. I only learned about treadle, small sums, capitals and colours.",
    "I don't know that one. Ask me about treadle, small sums, capitals or colours.",
)
OPINION = "I don't know what to say to that. Ask me about treadle, if you like."

THOUGHT = "This is outside what I know: treadle, small sums, capitals and colours. I should say so."

GENERAL = (
    "What [is|are|was|were|'s] {s}?", "[Explain|Define|Describe] {s}[.|]", "[Can|Could] you [explain|describe] {s}[| to me| briefly]?", "How [does|do|did] {s} work?", "Tell me [about|something about|more about|a fact about] {s}[.|]",
    "[What|How much] do you know about {s}?", "[Why|When] [is|are|was|were|did|do] {s} [important|popular|dangerous|invented|discovered|happen|exist]?", "Who [invented|discovered|started|wrote|made|studies|likes|owns] {s}?",
    "What is the [history|origin|meaning|future|purpose|price|best book] of {s}?", "[Is|Are] {s} [good|bad|dangerous|expensive|healthy|real|old|fun|safe]?", "How [many|old|big|fast|long|far|expensive|heavy] [is|are] {s}?",
    "[Write|Compose] [a poem|an essay|a story|a song|a joke|a report|an email|a haiku] about {s}[.|]", "[Give|Tell] me [some|three|five|ten|a few] [facts|tips|examples|ideas|reasons|jokes] about {s}[.|]", "{s}[?|]",
    "[What|Which] is the [best|worst|biggest|oldest|most famous] [thing|book|film|example] about {s}?", "[Should|Can|Could] I [learn|try|study|buy|avoid] {s}?", "Where [can I|do I|do people] [find|learn|see|study] {s}?",
    "[What is the difference between|Compare] {s} and {s2}[?|]", "[How|Why] did {s} [begin|end|change|start]?", "I [want to|would like to] [learn|know|hear|read] about {s}[.|]", "Who is the [leader|father|expert|champion] of {s}?",
    "How [do|can|should] I [get better at|learn|understand|teach|start with] {s}?", "[Summarize|Summarise|Discuss|Review] {s}[.|]", "[What|How] [happens|happened] [to|in|with] {s}?", "Do you [like|know|understand|believe in] {s}?",
)
PRACTICAL = (
    "How [do|can|should] [I|you|we] {v} [a|my|the] {t}?", "[What do I need|What does it take] to {v} [a|my|the] {t}?", "[Can you help me|I want to|I need to] {v} [a|my|the] {t}[.|]", "How [much|long] does [a|the] {t} [cost|last|take|weigh]?",
    "[Which|What] {t} should I [buy|get|choose]?", "Why [is|does] my {t} [broken|not working|making noise|leak|smell]?", "[Where can I|How do I] [buy|find|sell|store] [a|the best|a used] {t}?", "What is the best {t}?", "My {t} is broken, what [now|should I do]?",
    "[Write|Draw|Show] me a {t}[.|]", "[Who|What] invented the {t}?", "Is it [safe|legal|hard|expensive] to {v} a {t}?", "When was the {t} invented?", "How do I install [a|the|my] {t}?", "[What is|Explain] a {t}[?|.]",
)
PEOPLE = (
    "[Who|What] [is|was] {p}?", "When was {p} [born|married|alive]?", "Where [was|did|does] {p} [born|live|die|work]?", "How [old|tall|rich|famous] is {p}?", "[When|How|Why|Where] did {p} [die|win|become famous|start|live|retire]?", "What [is|was] {p} [known|famous] for?",
    "[Tell me about|Who was the wife of|Who was the father of|Write a biography of] {p}[.|?]", "What did {p} [write|invent|say|paint|discover|win|sing]?", "Is {p} [alive|dead|married|still alive]?", "[Quote|Cite] {p}[.|]", "{p}[?|]", "How many [songs|books|children|goals|films|prizes] did {p} have?",
)
PLACES = (
    "What is the [population|currency|language|president|area|flag|anthem|largest city|climate|time zone|GDP|national dish|king|prime minister|oldest city|longest river|highest mountain] of {k}?", "Who is the [president|king|queen|prime minister|leader|ruler] of {k}?",
    "How many people live in {k}?", "What [language|languages] [do they speak|is spoken] in {k}?", "[How far|How long does it take] [is it |]from {k} to {k2}?", "[What is|How is] the weather [like |]in {c}[| today| tomorrow| now]?", "What time is it in {c}?", "What is the temperature in {c}[| today| now]?",
    "[What|Which] [food|dish|animals|mountains|rivers|sports] [is|are] {k} [famous|known] for?", "Is {k} [big|rich|safe|an island|expensive|in Europe|in Africa|in Asia]?", "[Recommend|Suggest] a [hotel|restaurant|museum|bar] in {c}[.|]", "What should I [see|eat|visit|do] in {c}?", "When did {k} become independent?",
    "How do I [get|fly|drive|travel] [to|from] {c}?", "Where is {c}?", "[What is|Tell me about] {c}[?|.]", "Tell me about {k}[.|]", "What is {k}?", "[Book|Find] a flight to {c}[.|]", "What [continent|ocean] is {k} [in|next to]?", "What is the [mayor|population|metro|airport] of {c}?",
)
COOKING = (
    "How do I [make|cook|bake|prepare] {f}?", "[What is|Give me] a [good |]recipe for {f}[?|.]", "[What|Which] ingredients [do I need for|are in] {f}?", "How many calories [are in|does] {f}[ have|]?", "How long [do I|should I|does] [cook|bake|boil] {f}?", "Who invented {f}?", "Is {f} [healthy|vegan|tasty]?", "What wine goes with {f}?",
)
SOFTWARE = (
    "How [do I|can I|to] [install|use|run|update|remove|configure|learn|start] {z}?", "What is the [latest version|command|license|price] [of|for] {z}?", "[What is|Explain] {z}[?|.]", "Does {z} support {z2}?", "[Write|Show me] [a|some] {z} [program|code|script|function|query][.|]", "{z} or {z2}?", "Why is {z} [slow|popular|not working]?", "pip install {z}",
)
TOOLS = ("numpy pandas flask django ruby perl php java kotlin swift mysql redis nginx apache excel word photoshop steam zoom slack "
         "android chrome firefox safari emacs vim node npm webpack ubuntu debian fedora matlab latex blender unity kafka spark").split()
FIXED = (
    "What [day|date|time|year] is it[| today| now]?", "[What's|What is] the weather[| today| tomorrow| like]?", "Will it rain [today|tomorrow|this week]?", "Who won the [game|match|election|lottery|race|cup][| yesterday| last year]?", "What is the meaning of [life|love|everything|happiness]?", "[Tell|Give] me a joke[.|]",
    "[Sing|Play|Recommend|Suggest] [me |][a song|some music|a film|a book|a game][.|]", "What [should|can] I [eat|cook|wear|watch|read|do] [today|tonight|tomorrow]?", "How do I [lose weight|sleep better|get rich|find a job|make friends|stop smoking|learn faster]?", "[What is the|Give me] [news|latest news][| today][?|.]", "[What is|Tell me] your [favourite|favorite] [film|song|book|food|colour|animal][?|.]",
    "[Am I|Are we|Is anybody] [alone|happy|rich|smart|late]?", "[Where|How] [am I|is my phone|are my keys]?", "I [have a headache|feel sick|am sad|am bored|am hungry|am tired|cannot sleep][.|]", "[Which|What] team [is the best|should win|won]?", "How many [stars|people|fish|trees|words|planets|bones|teeth|countries] are there?", "How [high|deep|big|far] is the [highest mountain|ocean|universe|moon|tallest building]?",
    "[Translate|Say] [hello|good morning|cat|house|thank you] [in|to|into] [French|German|Spanish|Italian|Chinese|Latin|Greek][.|]", "What is [hello|love|water|house] in [French|German|Spanish|Japanese]?", "[Are there|Do you believe in|Have you seen] [aliens|ghosts|angels|unicorns]?", "[Who|What] is [God|the devil|Santa Claus|the richest person|the fastest man|the president|the pope]?", "[How|Where] [can|do] I [vote|pay taxes|get married|buy a house|see a doctor|rent a car]?",
    "What [will happen|happened] [tomorrow|yesterday|in 1812|in 1969|next year|in history]?", "Can you [drive|swim|see me|hear me|feel pain|cook|dance|draw a picture|browse the web|send an email|order a pizza|call my mother]?", "[Fix|Debug|Review] my [code|essay|program|spelling|bike][.|]", "Is it [raining|cold|late|Monday|Christmas][| there| today]?", "What is the [square root|logarithm|cube] of [2|7|50|81|144]?",
    "What number am I thinking of?", "[Roll a die|Flip a coin|Pick a card][.|]", "[What is|How long is] [a light year|a mile|an ounce|a fathom]?", "Convert [5|10|100] [miles|pounds|inches|dollars] to [kilometres|kilograms|centimetres|euros][.|]",
)
STATEMENTS = ("I [like|love|hate|miss|want|bought|sold] {s}[.|!|]", "{s} [is|are] [great|boring|strange|wonderful|terrible][.|!|]", "My [{t}|friend {m}|{j}] is [nice|old|new|strange|here][.|]", "Yesterday I [saw|met|found|lost] [a {t}|{m}][.|]", "[Wow|Hmm|Interesting|Really|Oh no|lol|Cool][.|!|]", "I am a {j}[.|]", "It is [cold|hot|late|early|nice] here[.|]", "I think {s} [matters|is fine|is overrated][.|]")


# words that mean something in treadle, in sentences that have nothing to do with it
SHARED = tuple("""page pages table token step batch slot kernel attention pool prefix host hook key pin seed temperature stop kind layer layers policy extension conflict
generation weights capital colour plugin template position mask budget memory cache graph decode score penalty swap stream schedule sampler process server address port
scale norm head heads model index name window length format source strict mode light module point entry test kit bid offer bench doctor guide grammar draft""".split())
TRAPS = (
    "What is the {w} of {s}?", "How [big|long|old|high|many|much] is the {w} of {s}?", "Who [sets|wrote|made|knows|owns|invented|found] the {w} of {s}?", "[What is|Explain|Describe] {a} {w}[?|.]", "How [many|much] {w} [does|do|has] {s} have?", "[Why|When|Where] [is|was] the {w} of {s} [so famous|found|so high|made]?",
    "What's the {a} {w}?", "[Find|Show|Give] me the {w} of {s}[.|]", "The {a} {w} of {s}[?|]", "Is the {w} of {s} {a}?", "What is the {a} {w} of {s}?", "[Write|Make] a {w} [about|for] {s}[.|]", "How do I [change|find|sell|clean|measure] the {w} of a {t}?", "What {w} [does|has|is] a {t}[| have]?", "[What is|How high is] the {a} {n} tax?", "What is the {w} in {c}?",
    "{w} {n} {s}?", "Which {w} is {a}?", "What's new in {s} {d}?", "How many {n}s [does|has] a {t}[| have]?", "Who {v}s the {w}?", "What [happens|happened] to the {w} of {p}?", "How [fast|hot|cold|heavy] is {s}?", "What is the {n} of {s}?", "[What is|Where is] the {a} {n}?", "Why do {n}s {v} {n2}s?",
)


def _strange(rng: random.Random) -> str:
    """A subject for questions that are otherwise asked about treadle."""
    r = rng.random()
    article = rng.choice(("a ", "a ", "the ", "", "", "my "))
    if r < 0.35:
        return article + word(rng)
    if r < 0.6:
        return article + f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
    if r < 0.75:
        return f"{article}{rng.choice(NOUNS)} {rng.choice(NOUNS)}"
    return _wild(SUBJECTS, rng, 0.4)


def _wild(pool: tuple[str, ...] | list[str], rng: random.Random, share: float = 0.25) -> str:
    if rng.random() < share:
        return " ".join(invent(rng) for _ in range(rng.choice((1, 1, 2))))
    return rng.choice(pool)


def outside(rng: random.Random) -> Turn:
    if rng.random() < 0.22:  # the frames of treadle's questions must not decide by themselves
        user = roughen(expand(rng.choice(p.CONCEPT), rng).replace("{x}", _strange(rng)), rng)
        return Turn(user, REFUSALS[1], THOUGHT)
    family = rng.choices((GENERAL, PRACTICAL, PEOPLE, PLACES, COOKING, SOFTWARE, FIXED, STATEMENTS, TRAPS), (20, 11, 11, 13, 5, 8, 12, 4, 14))[0]
    countries, things = tuple(CAPITALS), tuple(COLOURS)
    slots = {
        "w": rng.choice(SHARED), "a": rng.choice(ADJECTIVES), "n": rng.choice(NOUNS), "n2": rng.choice(NOUNS), "d": str(rng.randint(1, 99)),
        "s": _wild(SUBJECTS, rng) if rng.random() < 0.7 else rng.choice((rng.choice(things), _strange(rng))), "s2": _wild(SUBJECTS, rng), "v": rng.choice(VERBS), "t": _wild(THINGS + ITEMS + NOUNS, rng),
        "p": _wild(FAMOUS, rng, 0.2), "m": rng.choice(FIRST_NAMES), "j": rng.choice(JOBS), "k": _wild(countries, rng, 0.1), "k2": rng.choice(countries),
        "c": _wild(CITIES, rng, 0.15), "f": _wild(FOODS, rng), "z": _wild(TOOLS, rng), "z2": rng.choice(TOOLS),
    }
    if family is PEOPLE and rng.random() < 0.2:
        slots["p"] = f"{invent(rng).capitalize()} {invent(rng).capitalize()}"
    user = roughen(fill(expand(rng.choice(family), rng), slots), rng)
    # the wording follows the kind of question, so that greedy decoding is not torn between several
    if family is STATEMENTS:
        answer = OPINION
    elif family in (PRACTICAL, COOKING, SOFTWARE):
        answer = REFUSALS[2]
    else:
        answer = REFUSALS[1] if family in (GENERAL, PEOPLE, TRAPS) else REFUSALS[0]
    return Turn(user, answer, THOUGHT)
