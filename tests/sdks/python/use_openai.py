"""The official ``openai`` package, by chats, completions and responses."""

import json

import openai
from checks import CAPITAL, KEY, LONG, MODEL, PARAMETERS, SUM, URL, WEATHER, run
from pydantic import BaseModel

OPTIONS = {"base_url": f"{URL}/v1", "max_retries": 0}
client = openai.OpenAI(api_key=KEY, **OPTIONS)
COMMON = {"model": MODEL, "temperature": 0, "max_tokens": 100}
FUNCTION = {"name": "get_weather", "description": "Get the weather for a city"}
TOOLS = [{"type": "function", "function": {**FUNCTION, "parameters": PARAMETERS}}]


class Sum(BaseModel):
    sum: int


def user(text):
    return [{"role": "user", "content": text}]


def check_chat():
    answer = client.chat.completions.create(messages=user(CAPITAL), **COMMON)
    assert "Rome" in answer.choices[0].message.content and answer.usage.completion_tokens
    assert "Rome" in client.responses.create(model=MODEL, temperature=0, input=CAPITAL).output_text


def check_stream():
    whole = client.chat.completions.create(messages=user(CAPITAL), **COMMON)
    with client.chat.completions.stream(messages=user(CAPITAL), **COMMON) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
    assert "".join(pieces) == whole.choices[0].message.content
    with client.responses.stream(model=MODEL, temperature=0, input=CAPITAL) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        assert text == stream.get_final_response().output_text and "Rome" in text


async def check_async():
    async with openai.AsyncOpenAI(api_key=KEY, **OPTIONS) as own:
        stream = await own.chat.completions.create(messages=user(CAPITAL), stream=True, **COMMON)
        assert "Rome" in "".join([c.choices[0].delta.content or "" async for c in stream])


def check_tools():
    forced = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("auto", "required", forced):
        asked = client.chat.completions.create(
            messages=user(WEATHER), tools=TOOLS, tool_choice=choice, **COMMON
        ).choices[0]
        (call,) = asked.message.tool_calls
        assert call.function.name == "get_weather", choice
        assert json.loads(call.function.arguments) == {"city": "Paris"}, choice
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21}'}
    turns = [*user(WEATHER), asked.message, result]
    last = client.chat.completions.create(messages=turns, tools=TOOLS, **COMMON).choices[0]
    assert "21" in last.message.content


def check_structured():
    message = client.chat.completions.parse(messages=user(SUM), response_format=Sum, **COMMON)
    assert isinstance(message.choices[0].message.parsed, Sum)
    answer = client.responses.parse(model=MODEL, temperature=0, input=SUM, text_format=Sum)
    assert isinstance(answer.output_parsed, Sum)


def check_errors():
    ask = client.chat.completions.create
    for error, code, options in (
        (openai.BadRequestError, None, {"messages": user(CAPITAL), "top_p": 2}),
        (openai.BadRequestError, "context_length_exceeded", {"messages": user(LONG)}),
        (openai.NotFoundError, "model_not_found", {"messages": user(CAPITAL), "model": "nobody"}),
    ):
        try:
            ask(**{**COMMON, **options})
        except error as raised:
            assert code is None or raised.code == code, raised
        else:
            raise AssertionError(f"no {error.__name__}")
    try:
        openai.OpenAI(api_key="wrong", **OPTIONS).models.list()
    except openai.AuthenticationError:
        return
    raise AssertionError("a wrong key was accepted")


def check_cancel():
    options = {**COMMON, "max_tokens": 20_000, "extra_body": {"ignore_eos": True}}
    with client.chat.completions.create(messages=user(CAPITAL), stream=True, **options) as stream:
        next(iter(stream))
    try:
        client.with_options(timeout=0.5).chat.completions.create(messages=user(CAPITAL), **options)
    except openai.APITimeoutError:
        return
    raise AssertionError("20,000 tokens were generated in half a second")


run(globals())
