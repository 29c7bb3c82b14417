"""Held-out tools and requests: tools of known kinds in new words, and tools of new kinds."""

# fmt: off
# One entry is one line, and a list of words is a text: so they can be compared and edited.
from __future__ import annotations

__all__ = ("EXTRACTS", "JSON_FORMS", "KNOWN", "NEW", "RESULTS", "tool")

from typing import Any


def tool(name: str, about: str, /, **params: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": about, "parameters": {
        "type": "object", "properties": {k: {"type": t} for k, t in params.items()}, "required": list(params)}}}


WEATHER = tool("get_weather", "Get the weather for a city", city="string")
CALC = tool("calculator", "Evaluate an arithmetic expression", expression="string")
SEARCH = tool("web_search", "Search the web", query="string")
TIME = tool("get_current_time", "Tell the current time in a city", city="string")
MAIL = tool("send_email", "Send an email to somebody", to="string", subject="string")
ALARM = tool("set_alarm", "Set an alarm at a time", time="string")
NOTE = tool("save_note", "Save a note", text="string")
STOCK = tool("get_stock_price", "Get the price of a stock", symbol="string")

# (tools, question, name, arguments)
KNOWN = (
    ([WEATHER], "How's the weather over in Brunswick?", "get_weather", {"city": "Brunswick"}), ([WEATHER, CALC], "Will I need a coat in Tallinn today?", "get_weather", {"city": "Tallinn"}), ([CALC, WEATHER], "Could you tell me if it rains in Porvoo?", "get_weather", {"city": "Porvoo"}),
    ([WEATHER], "please look up the weather, I am in Zagreb", "get_weather", {"city": "Zagreb"}), ([SEARCH, WEATHER], "Is Marseille sunny at the moment?", "get_weather", {"city": "Marseille"}), ([WEATHER, TIME], "What's the weather in Kobe like?", "get_weather", {"city": "Kobe"}),
    ([CALC], "What's 4812 * 77?", "calculator", {"expression": "4812 * 77"}), ([CALC, SEARCH], "Please work this out: 991 - 278", "calculator", {"expression": "991 - 278"}), ([WEATHER, CALC], "I'd like you to compute 63 / 9 + 5", "calculator", {"expression": "63 / 9 + 5"}),
    ([SEARCH], "Can you search for vintage radios?", "web_search", {"query": "vintage radios"}), ([CALC, SEARCH], "Please find something about copper pipes.", "web_search", {"query": "copper pipes"}), ([SEARCH, NOTE], "Look on the web for grelda mills", "web_search", {"query": "grelda mills"}),
    ([TIME, WEATHER], "Which time is it in Perth?", "get_current_time", {"city": "Perth"}), ([WEATHER, TIME], "Can you tell me the time in Quito?", "get_current_time", {"city": "Quito"}), ([MAIL], "Please send an email to zora@plim.org about bicycle parts", "send_email", {"to": "zora@plim.org", "subject": "bicycle parts"}),
    ([MAIL, NOTE], "Write to bob@example.com, the subject is invoice", "send_email", {"to": "bob@example.com", "subject": "invoice"}), ([ALARM], "Please wake me at 07:25", "set_alarm", {"time": "07:25"}), ([ALARM, NOTE], "I need to get up at 5:50, set an alarm", "set_alarm", {"time": "5:50"}),
    ([NOTE, CALC], "Please note: buy green paint", "save_note", {"text": "buy green paint"}), ([STOCK], "Tell me the price of the stock QXT", "get_stock_price", {"symbol": "QXT"}), ([STOCK, WEATHER], "At what price does NVDA trade?", "get_stock_price", {"symbol": "NVDA"}),
    ([tool("translate", "Translate a text into a language", text="string", language="string")], "Please translate lamp into Polish", "translate", {"text": "lamp", "language": "Polish"}),
    ([tool("convert_currency", "Convert money", amount="number", to="string", **{"from": "string"})], "Change 250 USD into EUR please", "convert_currency", {"amount": 250, "from": "USD", "to": "EUR"}),
    ([tool("play_song", "Play a song", title="string"), WEATHER], "Could you please play velvet ocean", "play_song", {"title": "velvet ocean"}),
    ([tool("set_timer", "Start a timer for some minutes", minutes="integer")], "Please start a timer that runs 14 minutes", "set_timer", {"minutes": 14}),
    ([tool("book_flight", "Book a flight", origin="string", destination="string")], "Please book me a flight from Oslo to Lugano", "book_flight", {"origin": "Oslo", "destination": "Lugano"}),
    ([WEATHER, ALARM], "Tell me about the weather conditions in Windhoek please", "get_weather", {"city": "Windhoek"}), ([MAIL, WEATHER], "Mail tim@horn.net, subject broken window", "send_email", {"to": "tim@horn.net", "subject": "broken window"}), ([SEARCH, STOCK], "Go and search for silver spoons", "web_search", {"query": "silver spoons"}),
    ([NOTE, TIME], "Keep a note: call the plumber", "save_note", {"text": "call the plumber"}), ([CALC, TIME], "Would you calculate 18 * 19 for me", "calculator", {"expression": "18 * 19"}), ([STOCK, CALC], "What does a share of BMW cost?", "get_stock_price", {"symbol": "BMW"}),
)
NEW = (
    ([tool("get_air_quality", "Get the air quality in a city", city="string")], "What is the air quality in Milan?", "get_air_quality", {"city": "Milan"}),
    ([tool("track_package", "Track a package by its number", number="integer"), WEATHER], "Track package 88421", "track_package", {"number": 88421}),
    ([tool("get_population", "Get the population of a country", country="string")], "What is the population of Norway?", "get_population", {"country": "Norway"}),
    ([tool("define_word", "Get the definition of a word", word="string"), CALC], "Define the word glimmer", "define_word", {"word": "glimmer"}),
    ([tool("get_horoscope", "Get the horoscope for a sign", sign="string")], "Get me the horoscope for Leo", "get_horoscope", {"sign": "Leo"}),
    ([tool("order_pizza", "Order a pizza", kind="string", size="string")], "Order a pizza with kind funghi and size large", "order_pizza", {"kind": "funghi", "size": "large"}),
    ([tool("find_hotel", "Find a hotel in a city", city="string"), SEARCH], "Find a hotel in Lisbon", "find_hotel", {"city": "Lisbon"}),
    ([tool("get_train", "Get the next train from a station", station="string")], "When is the next train from Harlow?", "get_train", {"station": "Harlow"}),
    ([tool("lookup_part", "Look up a part by its code", code="string")], "Look up part with code ZK-41", "lookup_part", {"code": "ZK-41"}),
    ([tool("get_bus", "Get the bus for a stop", stop="string", line="integer")], "Show the bus with stop Mill and line 12", "get_bus", {"stop": "Mill", "line": 12}),
    ([tool("delete_file", "Delete a file", name="string")], "Call delete_file with name report", "delete_file", {"name": "report"}),
    ([tool("get_exam_score", "Get the exam score of a student", student="string")], "What is the exam score of Petra?", "get_exam_score", {"student": "Petra"}),
    ([tool("get_tide", "Get the tide at a beach", beach="string")], "How is the tide at Brighton?", "get_tide", {"beach": "Brighton"}), ([tool("cancel_order", "Cancel an order", order_id="integer"), WEATHER], "Please cancel order 5521", "cancel_order", {"order_id": 5521}),
    ([tool("get_opening_hours", "Get the opening hours of a museum", museum="string")], "What are the opening hours of the Prado?", "get_opening_hours", {"museum": "Prado"}), ([SEARCH, tool("rename_file", "Rename a file", old="string", new="string")], "Rename the file with old alpha and new beta", "rename_file", {"old": "alpha", "new": "beta"}),
)
# (tools, question, call, result, words of the answer)
RESULTS = (
    (WEATHER, "How's the weather over in Brunswick?", {"city": "Brunswick"}, '{"city": "Brunswick", "temperature": 17, "condition": "cloudy"}', ("17", "cloudy")),
    (WEATHER, "Is it cold in Riga?", {"city": "Riga"}, '{"temperature": -4, "description": "snowy"}', ("-4", "snowy")), (CALC, "What's 4812 * 77?", {"expression": "4812 * 77"}, '{"result": 370524}', ("370524",)),
    (CALC, "I'd like you to compute 63 / 9", {"expression": "63 / 9"}, "7", ("7",)), (TIME, "Which time is it in Perth?", {"city": "Perth"}, '{"time": "21:40"}', ("21:40",)), (STOCK, "At what price does NVDA trade?", {"symbol": "NVDA"}, '{"symbol": "NVDA", "price": 812}', ("812",)),
    (SEARCH, "Can you search for vintage radios?", {"query": "vintage radios"}, '{"results": ["old brown radio"]}', ("old brown radio",)), (MAIL, "Write to bob@example.com, the subject is invoice", {"to": "bob@example.com", "subject": "invoice"}, '{"status": "sent"}', ("sent",)),
    (WEATHER, "What's the weather in Kobe like?", {"city": "Kobe"}, '{"error": "city unknown"}', ("fail",)), (STOCK, "Tell me the price of the stock QXT", {"symbol": "QXT"}, '{"price": 31}', ("31",)),
    (ALARM, "Please wake me at 07:25", {"time": "07:25"}, '{"status": "ok"}', ("07:25",)), (SEARCH, "Look on the web for grelda mills", {"query": "grelda mills"}, '{"title": "grelda history"}', ("grelda history",)),
)
JSON_FORMS = ("{q} Please answer as a JSON object whose keys are {k}.", "I want JSON with {k}. {q}", "{q} Your answer must be JSON with the keys {k}.", "Produce JSON ({k}): {q}", "{q} Let me have that in JSON, keys: {k}", "Only JSON please, {k} being the keys. {q}")
EXTRACTS = (
    ("Klara is 34 years old and lives in Bremen.", {"name": "Klara", "age": 34, "city": "Bremen"}), ("Otis works as a baker and lives in Dresden.", {"name": "Otis", "job": "baker", "city": "Dresden"}), ("Femke is 8 years old.", {"name": "Femke", "age": 8}),
    ("Rasmus bought a kettle and is from Aarhus.", {"name": "Rasmus", "item": "kettle", "city": "Aarhus"}), ("Old Bertha has a parrot.", {"name": "Bertha", "pet": "parrot"}), ("Ludo is a tailor and is 51.", {"name": "Ludo", "job": "tailor", "age": 51}), ("Wim turned 77 and has a dog.", {"name": "Wim", "age": 77, "pet": "dog"}),
    ("Greta is from Skagen.", {"person": "Greta", "city": "Skagen"}),
)
