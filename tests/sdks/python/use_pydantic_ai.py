"""``pydantic-ai``, by chats, responses and messages."""

from anthropic import AsyncAnthropic
from checks import CAPITAL, KEY, LONG, MODEL, SUM, URL, WEATHER, run
from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

SETTINGS = {"temperature": 0, "max_tokens": 150}


class Sum(BaseModel):
    """The result of an addition."""

    sum: int


def models(key=KEY):
    """Return a model of each protocol, with clients of its own: each run has its own event loop."""
    openai = OpenAIProvider(
        openai_client=AsyncOpenAI(base_url=f"{URL}/v1", api_key=key, max_retries=0)
    )
    anthropic = AnthropicProvider(
        anthropic_client=AsyncAnthropic(base_url=URL, api_key=key, max_retries=0)
    )
    return (
        OpenAIChatModel(MODEL, provider=openai),
        OpenAIResponsesModel(MODEL, provider=openai),
        AnthropicModel(MODEL, provider=anthropic),
    )


async def check_chat():
    for model in models():
        assert "Rome" in (await Agent(model, model_settings=SETTINGS).run(CAPITAL)).output, model


async def check_stream():
    for model in models():
        async with Agent(model, model_settings=SETTINGS).run_stream(CAPITAL) as result:
            pieces = [piece async for piece in result.stream_text(delta=True, debounce_by=None)]
        assert "Rome" in "".join(pieces), model


def weather_tool(cities):
    def get_weather(city: str) -> str:
        """Get the weather for a city"""
        cities.append(city)
        return '{"temperature": 21}'

    return get_weather


async def check_tools():
    for model in models():
        agent, cities = Agent(model, model_settings=SETTINGS), []

        agent.tool_plain(weather_tool(cities))
        answer = (await agent.run(WEATHER)).output
        assert cities == ["Paris"] and "21" in answer, (model, cities, answer)


async def check_structured():
    chats, responses, messages = models()
    for model, output in ((chats, Sum), (chats, NativeOutput(Sum)), (responses, NativeOutput(Sum))):
        agent = Agent(model, model_settings=SETTINGS, output_type=output)
        assert isinstance((await agent.run(SUM)).output, Sum), (model, output)
    agent = Agent(messages, model_settings=SETTINGS, output_type=Sum)
    assert isinstance((await agent.run(SUM)).output, Sum)


async def check_errors():
    for key, prompt, status in ((KEY, LONG, 400), ("wrong", CAPITAL, 401)):
        for model in models(key):
            try:
                await Agent(model, model_settings=SETTINGS).run(prompt)
            except ModelHTTPError as error:
                assert error.status_code == status, error
            else:
                raise AssertionError(f"{model}: no error")


async def check_cancel():
    settings = {**SETTINGS, "max_tokens": 20_000, "extra_body": {"ignore_eos": True}}
    async with Agent(models()[0], model_settings=settings).run_stream(CAPITAL) as result:
        async for _ in result.stream_text(debounce_by=None):
            break


run(globals())
