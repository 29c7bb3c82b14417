"""``litellm``, by each provider that speaks one of the server's protocols."""

import json

import litellm
from checks import CAPITAL, KEY, LONG, MODEL, PARAMETERS, SUM, URL, WEATHER, run
from pydantic import BaseModel

litellm.suppress_debug_info = True
BASES = {
    "openai": f"{URL}/v1",
    "hosted_vllm": f"{URL}/v1",
    "anthropic": URL,
    "ollama_chat": URL,
}
FUNCTION = {"name": "get_weather", "description": "Get the weather for a city"}
TOOLS = [{"type": "function", "function": {**FUNCTION, "parameters": PARAMETERS}}]


class Sum(BaseModel):
    sum: int


def ask(provider, text, **options):
    common = {"temperature": 0, "max_tokens": 100, "num_retries": 0, "api_key": KEY}
    return litellm.completion(
        f"{provider}/{MODEL}",
        messages=[{"role": "user", "content": text}],
        api_base=BASES[provider],
        **{**common, **options},
    )


def check_chat():
    for provider in BASES:
        assert "Rome" in ask(provider, CAPITAL).choices[0].message.content, provider


def check_stream():
    for provider in BASES:
        chunks = list(ask(provider, CAPITAL, stream=True))
        assert "Rome" in "".join(c.choices[0].delta.content or "" for c in chunks), provider


def check_tools():
    for provider in BASES:
        (call,) = ask(provider, WEATHER, tools=TOOLS).choices[0].message.tool_calls
        arguments = json.loads(call.function.arguments)
        assert (call.function.name, arguments) == ("get_weather", {"city": "Paris"}), provider


def check_structured():
    for provider in ("openai", "hosted_vllm"):
        Sum.model_validate_json(ask(provider, SUM, response_format=Sum).choices[0].message.content)


def check_errors():
    for provider in ("openai", "hosted_vllm", "anthropic"):
        for error, text, options in (
            (litellm.ContextWindowExceededError, LONG, {}),
            (litellm.AuthenticationError, CAPITAL, {"api_key": "wrong"}),
        ):
            try:
                ask(provider, text, **options)
            except error:
                continue
            raise AssertionError(f"{provider}: no {error.__name__}")


def check_cancel():
    body = {"ignore_eos": True}
    stream = ask("openai", CAPITAL, stream=True, max_tokens=20_000, extra_body=body)
    next(iter(stream))
    stream.completion_stream.close()


run(globals())
