"""``langchain-openai`` and ``langchain-anthropic``."""

import anthropic
import openai
from checks import CAPITAL, KEY, LONG, MODEL, SUM, URL, WEATHER, run
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

OPTIONS = {"model": MODEL, "max_retries": 0}
OPENAI = {**OPTIONS, "temperature": 0, "base_url": f"{URL}/v1"}
chats = ChatOpenAI(api_key=KEY, max_tokens=100, **OPENAI)
responses = ChatOpenAI(api_key=KEY, use_responses_api=True, **OPENAI)
messages = ChatAnthropic(base_url=URL, api_key=KEY, max_tokens=100, temperature=0, **OPTIONS)
ALL = (chats, responses, messages)


class Sum(BaseModel):
    """The result of an addition."""

    sum: int


@tool
def get_weather(city: str) -> str:
    """Get the weather for a city"""
    return '{"temperature": 21}'


def check_chat():
    for model in ALL:
        answer = model.invoke(CAPITAL)
        assert "Rome" in answer.text and answer.usage_metadata["output_tokens"], answer
        assert [a.text for a in model.batch([CAPITAL] * 2)] == [answer.text] * 2


def check_stream():
    for model in ALL:
        assert "Rome" in "".join(chunk.text for chunk in model.stream(CAPITAL)), model


async def check_async():
    assert "Rome" in (await chats.ainvoke(CAPITAL)).text


def check_tools():
    for model in ALL:
        question = HumanMessage(WEATHER)
        asked = model.bind_tools([get_weather], tool_choice="get_weather").invoke([question])
        (call,) = asked.tool_calls
        assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"}), call
        result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
        last = model.bind_tools([get_weather]).invoke([question, asked, result])
        assert "21" in last.text, last


def check_structured():
    for method in ("json_schema", "function_calling"):
        assert isinstance(chats.with_structured_output(Sum, method=method).invoke(SUM), Sum)
    assert isinstance(messages.with_structured_output(Sum).invoke(SUM), Sum)


def check_errors():
    wrong = ChatOpenAI(api_key="wrong", **OPENAI)
    for ask, prompt, error in (
        (chats, LONG, openai.BadRequestError),
        (messages, LONG, anthropic.BadRequestError),
        (wrong, CAPITAL, openai.AuthenticationError),
    ):
        try:
            ask.invoke(prompt)
        except error:
            continue
        raise AssertionError(f"no {error}")


def check_cancel():
    body = {"ignore_eos": True}
    model = ChatOpenAI(api_key=KEY, max_tokens=20_000, extra_body=body, **OPENAI)
    stream = model.stream(CAPITAL)
    next(stream)
    stream.close()


run(globals())
