"""The OpenAI Agents SDK, by responses (its default) and chats."""

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from checks import CAPITAL, KEY, LONG, MODEL, SUM, URL, WEATHER, run
from pydantic import BaseModel

set_tracing_disabled(True)
SETTINGS = ModelSettings(temperature=0, max_tokens=150)
cities = []


class Sum(BaseModel):
    sum: int


@function_tool
def get_weather(city: str) -> str:
    """Get the weather for a city"""
    cities.append(city)
    return '{"temperature": 21}'


def agents(key=KEY, settings=SETTINGS, **options):
    client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=key, max_retries=0)
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        model = kind(model=MODEL, openai_client=client)
        yield Agent("demo", model=model, model_settings=settings, **options)


async def check_chat():
    for agent in agents():
        assert "Rome" in (await Runner.run(agent, CAPITAL)).final_output, agent


async def check_stream():
    for agent in agents():
        result = Runner.run_streamed(agent, CAPITAL)
        events = [event.type async for event in result.stream_events()]
        assert "Rome" in result.final_output and len(events) > 5, events


async def check_tools():
    for agent in agents(tools=[get_weather]):
        result = await Runner.run(agent, WEATHER)
        assert cities == ["Paris"] and "21" in result.final_output, result
        cities.clear()


async def check_structured():
    for agent in agents(output_type=Sum):
        assert isinstance((await Runner.run(agent, SUM)).final_output, Sum)


async def check_errors():
    for error, key, prompt in (
        (openai.BadRequestError, KEY, LONG),
        (openai.AuthenticationError, "wrong", CAPITAL),
    ):
        for agent in agents(key):
            try:
                await Runner.run(agent, prompt)
            except error:
                continue
            raise AssertionError(f"{agent}: no {error.__name__}")


async def check_cancel():
    body = {"ignore_eos": True}
    settings = ModelSettings(temperature=0, max_tokens=20_000, extra_body=body)
    for agent in agents(settings=settings):
        result = Runner.run_streamed(agent, CAPITAL)
        async for event in result.stream_events():
            if event.type == "raw_response_event":
                result.cancel()


run(globals())
