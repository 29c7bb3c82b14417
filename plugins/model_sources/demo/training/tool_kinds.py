"""Tools that training conversations offer: names, wordings and results."""

# fmt: off
# One entry is one line, and a list of words is a text: so they can be compared and edited.
from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from .grammar import invent, word
from .words import CITIES, FIRST_NAMES, FOODS, ITEMS

__all__ = ("KINDS", "Param", "ToolKind", "Value")

Value = Callable[[random.Random], "str | int | float"]


@dataclass(frozen=True, slots=True)
class Param:
    names: str
    value: Value
    about: str
    type: str = "string"


@dataclass(frozen=True, slots=True)
class ToolKind:
    names: str
    about: str
    params: tuple[Param, ...]
    asks: tuple[str, ...]  # {0}, {1} are the values of the parameters
    results: tuple[str, ...] = ()  # JSON with {0}, {1}; {n} a number, {w} a word
    says: tuple[str, ...] = ()  # one for each result


def city(rng: random.Random) -> str:
    return rng.choice(CITIES) if rng.random() < 0.6 else invent(rng, rng.choice((2, 3))).capitalize()


def person(rng: random.Random) -> str:
    return rng.choice(FIRST_NAMES) if rng.random() < 0.6 else invent(rng, 2).capitalize()


def words(rng: random.Random) -> str:
    pool = (*FOODS, *ITEMS)
    return " ".join(word(rng) if rng.random() < 0.75 else rng.choice(pool) for _ in range(rng.choice((1, 1, 2, 2, 3))))


def expression(rng: random.Random) -> str:
    a, b, c = (rng.randint(0, rng.choice((9, 99, 999, 99999))) for _ in range(3))
    ops = rng.choices("+-*/", k=2)
    return f"{a} {ops[0]} {b}" if rng.random() < 0.8 else f"{a} {ops[0]} {b} {ops[1]} {c}"


def ticker(rng: random.Random) -> str:
    return "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(rng.randint(2, 5)))


def email(rng: random.Random) -> str:
    return f"{person(rng).lower()}@{invent(rng)}.{rng.choice(('com', 'org', 'net'))}"


def clock(rng: random.Random) -> str:
    return f"{rng.randint(0, 23):02d}:{rng.choice((0, 5, 10, 15, 20, 30, 40, 45, 50)):02d}"


def date(rng: random.Random) -> str:
    return f"20{rng.randint(20, 35)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"


def number(low: int, high: int) -> Value:
    return lambda rng: rng.randint(low, high)


def one_of(*options: str) -> Value:
    return lambda rng: rng.choice(options)


LANGUAGE = one_of("French", "German", "Spanish", "Italian", "Japanese", "Greek", "Polish", "Dutch", "Swedish")
CURRENCY = one_of("USD", "EUR", "GBP", "JPY", "CHF", "SEK", "INR", "BRL", "CAD")
CITY = Param("city|location|place|town|city_name", city, "The city")
QUERY = Param("query|q|text|search|keywords|topic", words, "What to look for")
NAME = Param("name|person|to|recipient|contact|who", person, "The person")

KINDS = (
    ToolKind("get_weather|weather|fetch_weather|current_weather|weather_lookup|get_current_weather", "[Get|Look up|Return|Fetch] the [current |]weather [in|for|of] a [city|place|location][.|]", (CITY,),
             ("[What is|What's|How is] the weather [like |]in {0}[| today| now| right now]?", "[Is it|Will it be] [raining|sunny|cold|warm|hot|windy] in {0}[| today| now]?", "[Tell me|Check|Get|Show me] the weather [in|for] {0}[.|]", "Weather in {0}[?|, please|]", "Do I need an umbrella in {0}[| today]?",
              "[How warm|How cold|How hot] is it in {0}[| today| now]?", "What is the temperature in {0}[| now]?", "Should I [wear|take|bring|pack] [a hat|boots|gloves|sunglasses|a jacket] [in|to|for] {0}[| today]?", "[Will {0} be|Is {0}] [wet|frosty|foggy|dry|cloudy|icy][| today| tomorrow]?", "[Any|Is there] [rain|snow|wind|sunshine|fog] in {0}[| today| now]?", "{0} weather[?|, please|]", "[Forecast|Weather report] for {0}[.|]", "I am going to {0}. What is the weather[| there]?", "[Can|Could] you [check|tell me|look up] the weather in {0}?"),
             ('{"city": "{0}", "temperature": {n}, "condition": "{w}"}', '{"temperature": {n}, "description": "{w}"}'), ("In {0} it is {n} degrees and {w}.", "In {0} it is {n} degrees and {w}.")),
    ToolKind("calculate|calculator|evaluate|calc|math|compute", "[Evaluate|Calculate|Compute] [an arithmetic|a mathematical|a math] expression[.|]", (Param("expression|formula|input|expr", expression, "The expression"),),
             ("What is {0}?", "[Calculate|Compute|Evaluate|Work out] {0}[.|]", "[How much is|What's] {0}?", "{0} = ?", "[Use the calculator for|Use the tool for|Please calculate] {0}[.|]", "I need [the result of |the value of |]{0}[.|]", "[Can|Could] you [calculate|compute] {0}[| for me]?"),
             ('{"result": {n}}', "{n}"), ("The result is {n}.", "The result is {n}.")),
    ToolKind("search|web_search|search_web|google|find_documents|search_docs", "[Search|Look up] [the web|documents|the internet|the knowledge base][.| for a query.]", (QUERY,),
             ("[Search|Look] for {0}[.|]", "[Search the web|Look on the internet|Do a search] for {0}[.|]", "[Find|Get me] [information|articles|documents|pages|something] about {0}[.|]", "[Look up|Google] {0}[.|]", "What can you find about {0}?", "Search: {0}"),
             ('{"results": ["{w}"]}', '{"title": "{w}"}'), ("I found this: {w}.", "I found this: {w}.")),
    ToolKind("get_time|current_time|time_in|local_time", "[Get|Tell] the [current |local |]time in a [city|place][.|]", (CITY,),
             ("What time is it in {0}[| now]?", "[What's|Tell me] the time in {0}[.|]", "[Current|Local] time in {0}[?|]", "How late is it in {0}?"), ('{"time": "{t}"}', "{t}"), ("It is {t} in {0}.", "It is {t} in {0}.")),
    ToolKind("get_stock_price|stock_price|quote|get_quote|stock", "[Get|Look up] the [current |]price of a stock[.|]", (Param("symbol|ticker|stock|name", ticker, "The stock symbol"),),
             ("[What is|What's] the [stock |share |]price of {0}?", "[How much is|What does] [one share of |a share of |]{0}[ cost|]?", "[Check|Get|Show me] the stock {0}[.|]", "[How much|What] is {0} worth[| now| today]?", "[Value|Worth|Rate] of {0}[ shares| stock|]?", "[For how much|At what rate] [do|can] I [buy|get] {0}[ shares|]?", "[I want to buy|I own|I hold] {0}[.|,] what is [its|the] price?", "[How is|Price of] {0}[ doing|]?"), ('{"symbol": "{0}", "price": {n}}', '{"price": {n}, "currency": "USD"}'), ("{0} is at {n}.", "{0} is at {n} USD.")),
    ToolKind("send_email|email|send_mail|mail", "Send an email[.| to an address.]", (Param("to|address|recipient|email", email, "The address"), Param("subject|title|topic", words, "The subject")),
             ("[Send|Write] an email to {0} [about|with the subject] {1}[.|]", "[Email|Mail] {0} about {1}[.|]", "[Please s|S]end {0} a mail with subject {1}[.|]"), ('{"status": "sent"}',), ("I sent the email to {0}.",)),
    ToolKind("send_message|message|text|send_sms", "Send a [text |]message to a [person|contact][.|]", (NAME, Param("message|body|content|text", words, "The message")),
             ("[Send|Write] {0} [a message|the message][:| saying] {1}[.|]", "[Tell|Text|Message] {0}: {1}", "Tell {0} {1}[.|]"), ('{"status": "ok"}',), ("I sent the message to {0}.",)),
    ToolKind("set_alarm|alarm|wake_up|create_alarm", "Set an alarm[.| at a time.]", (Param("time|at|when|hour", clock, "When"),),
             ("[Set|Make] an alarm [for|at] {0}[.|]", "Wake me [up |]at {0}[.|]", "[I need an|Please set an] alarm at {0}[.|]"), ('{"status": "ok", "time": "{0}"}',), ("The alarm is set for {0}.",)),
    ToolKind("set_timer|timer|start_timer|countdown", "Start a timer[.| for some minutes.]", (Param("minutes|duration|length|time", number(1, 180), "Minutes", "integer"),),
             ("[Set|Start] a timer [for|of] {0} minutes[.|]", "[Timer|Countdown][:|] {0} minutes[.|]", "Remind me in {0} minutes[.|]", "Count down {0} minutes[.|]"), ('{"status": "started"}',), ("The timer runs for {0} minutes.",)),
    ToolKind("translate|translate_text|translation|get_translation", "Translate [a text|text][.| into another language.]", (Param("text|sentence|input|phrase", words, "The text"), Param("language|target|to|target_language", LANGUAGE, "The language")),
             ("[Translate|Put] {0} [to|into] {1}[.|]", "[What is|How do you say|How do I say] {0} in {1}?", "Translate \"{0}\" into {1}[.|]"), ('{"translation": "{w}"}', "{w}"), ("In {1} it is: {w}.", "In {1} it is: {w}.")),
    ToolKind("convert_currency|currency|exchange|convert_money", "Convert [an amount of money|money|currencies][.|]", (Param("amount|value|sum", number(1, 5000), "The amount", "number"), Param("from|source|from_currency", CURRENCY, "From"), Param("to|target|to_currency", CURRENCY, "To")),
             ("[Convert|Change|Exchange] {0} {1} [to|into] {2}[.|]", "[How much is|What is|What are] {0} {1} in {2}?", "{0} {1} [in|to] {2}[?|]"), ('{"amount": {n}}', '{"result": {n}, "currency": "{2}"}'), ("{0} {1} is {n} {2}.", "{0} {1} is {n} {2}.")),
    ToolKind("create_event|add_event|calendar|schedule_meeting|book_meeting", "[Create|Add] [an event|a meeting] [in|to] the calendar[.|]", (Param("title|name|event|subject", words, "The title"), Param("date|day|when", date, "The day")),
             ("[Create|Add] an event {0} on {1}[.|]", "[Schedule|Plan] {0} for {1}[.|]", "Put {0} in my calendar on {1}[.|]", "[Book|Set up] a meeting about {0} on {1}[.|]"), ('{"status": "created"}',), ("I added {0} on {1}.",)),
    ToolKind("find_recipe|recipe|get_recipe|recipes", "[Find|Get] a recipe[.| for a dish.]", (Param("dish|food|meal|name", lambda r: r.choice(FOODS) if r.random() < 0.6 else invent(r), "The dish"),),
             ("[Find|Show|Give] me a recipe for {0}[.|]", "How do I [make|cook|prepare] {0}?", "[Recipe for|I want to cook] {0}[.|]", "I feel like eating {0}[.|] [Find|Get] a recipe[.|]"), ('{"recipe": "{w}"}',), ("Here is a recipe: {w}.",)),
    ToolKind("play_music|play|play_song|music", "Play [music|a song][.|]", (Param("song|title|track|artist|name", words, "The song"),),
             ("[Play|Put on|Start] {0}[.|]", "[Play|I want to hear|Let me hear] the song {0}[.|]", "[Can|Could] you play {0}?"), ('{"status": "playing"}',), ("I am playing {0}.",)),
    ToolKind("book_flight|find_flights|flights|search_flights", "[Find|Book] flights between two cities[.|]", (Param("from|origin|departure|from_city", city, "From"), Param("to|destination|arrival|to_city", city, "To")),
             ("[Find|Book|Show|Search] [a flight|flights|me a flight] from {0} to {1}[.|]", "I want to fly from {0} to {1}[.|]", "Which flights go from {0} to {1}?", "Fly me from {0} to {1}[.|]"), ('{"flight": "{w}", "price": {n}}',), ("The flight {w} costs {n}.",)),
    ToolKind("book_table|reserve_table|reservation|book_restaurant", "[Book|Reserve] a table [in|at] a restaurant[.|]", (Param("restaurant|place|name", lambda r: invent(r).capitalize(), "The restaurant"), Param("people|guests|persons|size", number(1, 12), "How many", "integer")),
             ("[Book|Reserve|Get] a table at {0} for {1}[| people][.|]", "[I need|We want] a table for {1} at {0}[.|]", "Table for {1} [at|in] {0}[, please|.|]"), ('{"status": "confirmed"}',), ("Your table at {0} for {1} is booked.",)),
    ToolKind("add_note|take_note|save_note|note|remember", "[Save|Add|Write] a note[.|]", (Param("text|note|content|body", words, "The note"),),
             ("[Note|Write down|Save|Take a note][:|] {0}", "Add a note[:|] {0}[.|]", "[Make|Save] a note about {0}[.|]"), ('{"status": "saved"}',), ("I saved the note.",)),
    ToolKind("turn_on_light|light_on|switch_light|lights", "[Turn on|Switch on] the light [in|of] a room[.|]", (Param("room|where|place|location", one_of("kitchen", "bedroom", "hall", "office", "bathroom", "garage", "cellar", "attic", "living room"), "The room"),),
             ("[Turn|Switch] on the light in the {0}[.|]", "[Light in|Make light in] the {0}[, please|.|]", "It is dark in the {0}[.|]", "Turn the {0} light on[.|]"), ('{"status": "on"}',), ("The light in the {0} is on.",)),
    ToolKind("get_user|find_user|lookup_user|user_info|get_customer", "[Get|Find|Look up] a [user|customer] by [id|number][.|]", (Param("id|user_id|number|customer_id", number(1, 99999), "The number", "integer"),),
             ("[Find|Show|Get|Look up] [user|customer] {0}[.|]", "Who is [user|customer] [number |]{0}?", "[Information|Details] about [user|customer] {0}[.|]"), ('{"name": "{W}", "age": {n}}', '{"name": "{W}"}'), ("The name is {W}; the age is {n}.", "The name is {W}.")),
    ToolKind("create_task|add_todo|add_task|todo", "[Add|Create] a [task|todo] [with a priority|][.|]", (Param("title|task|name|text", words, "The task"), Param("priority|level|importance", one_of("low", "medium", "high"), "Priority")),
             ("[Add|Create] a {1} priority task[:|] {0}[.|]", "[Add|Put] {0} [to|on] my list with {1} priority[.|]", "New task {0}, priority {1}[.|]"), ('{"status": "added"}',), ("I added {0} with {1} priority.",)),
    ToolKind("roll_dice|random_number|dice|random", "[Roll a die|Get a random number][.|]", (Param("sides|max|limit|upper", number(2, 1000), "How many sides", "integer"),),
             ("Roll a die with {0} sides[.|]", "[Give me|Pick|Get] a random number up to {0}[.|]", "Random number [between 1 and|from 1 to] {0}[.|]"), ('{"value": {n}}', "{n}"), ("The number is {n}.", "The number is {n}.")),
)
