"""The official ``anthropic`` package, by messages."""

import anthropic
from checks import CAPITAL, KEY, LONG, MODEL, PARAMETERS, SUM, URL, WEATHER, run
from pydantic import BaseModel

OPTIONS = {"base_url": URL, "max_retries": 0}
client = anthropic.Anthropic(api_key=KEY, **OPTIONS)
EXACT = {"temperature": 0}
"""The SDK refuses to send it by its own argument to a model that it does not know."""
COMMON = {"model": MODEL, "max_tokens": 100, "extra_body": EXACT}
DESCRIPTION = "Get the weather for a city"
TOOLS = [{"name": "get_weather", "description": DESCRIPTION, "input_schema": PARAMETERS}]


class Sum(BaseModel):
    sum: int


def user(text):
    return [{"role": "user", "content": text}]


def check_chat():
    answer = client.messages.create(messages=user(CAPITAL), **COMMON)
    assert "Rome" in answer.content[0].text and answer.usage.output_tokens
    counted = client.messages.count_tokens(model=MODEL, messages=user(CAPITAL)).input_tokens
    assert counted == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)


def check_stream():
    whole = client.messages.create(messages=user(CAPITAL), **COMMON)
    with client.messages.stream(messages=user(CAPITAL), **COMMON) as stream:
        pieces = list(stream.text_stream)
        last = stream.get_final_message()
    assert "".join(pieces) == last.content[0].text == whole.content[0].text


async def check_async():
    async with (
        anthropic.AsyncAnthropic(api_key=KEY, **OPTIONS) as own,
        own.messages.stream(messages=user(CAPITAL), **COMMON) as stream,
    ):
        assert "Rome" in await stream.get_final_text()


def check_tools():
    for choice in ("auto", "any", "tool"):
        named = {"name": "get_weather"} if choice == "tool" else {}
        asked = client.messages.create(
            messages=user(WEATHER), tools=TOOLS, tool_choice={"type": choice, **named}, **COMMON
        )
        call = asked.content[-1]
        assert asked.stop_reason == "tool_use", (choice, asked)
        assert (call.name, call.input) == ("get_weather", {"city": "Paris"}), choice
    result = {"type": "tool_result", "tool_use_id": call.id, "content": '{"temperature": 21}'}
    turns = [*user(WEATHER), {"role": "assistant", "content": asked.content}]
    turns.append({"role": "user", "content": [result]})
    last = client.messages.create(messages=turns, tools=TOOLS, **COMMON)
    assert "21" in last.content[0].text


def check_structured():
    answer = client.messages.parse(messages=user(SUM), output_format=Sum, **COMMON)
    assert isinstance(answer.parsed_output, Sum)


def check_errors():
    ask = client.messages.create
    for error, options in (
        (anthropic.BadRequestError, {"messages": user(CAPITAL), "extra_body": {"top_p": 2}}),
        (anthropic.BadRequestError, {"messages": user(LONG)}),
        (anthropic.NotFoundError, {"messages": user(CAPITAL), "model": "nobody"}),
    ):
        try:
            ask(**{**COMMON, **options})
        except error as raised:
            assert raised.body["type"] == "error", raised.body
        else:
            raise AssertionError(f"no {error.__name__}")
    try:
        anthropic.Anthropic(api_key="wrong", **OPTIONS).messages.create(
            messages=user(CAPITAL), **COMMON
        )
    except anthropic.AuthenticationError:
        return
    raise AssertionError("a wrong key was accepted")


def check_cancel():
    options = {**COMMON, "max_tokens": 20_000, "extra_body": {**EXACT, "ignore_eos": True}}
    with client.messages.stream(messages=user(CAPITAL), **options) as stream:
        next(iter(stream.text_stream))


run(globals())
