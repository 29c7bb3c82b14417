"""``thinking_token_budget`` of chats: the demo model thinks for fewer tokens, and answers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from process import Process, served

from treadle import SamplingParams
from treadle.plugins import PluginManager
from treadle.text.chat import Conversation, PreparedChat
from treadle.text.parser_plugins import ParserPlugins
from treadle.text.prompts import Prompt
from treadle_server.chat.prepare import with_hint

SUM: Any = [{"role": "user", "content": "What is 12 plus 30?"}]
MODEL: Any = "demo:treadle-demo"
THOUGHT = r'"(reasoning|thinking)":"[^"]|"reasoning_text"'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with served(MODEL, tmp_path_factory.mktemp("log") / "log") as process:
        yield process


def test_a_thought_is_cut_in_requests(server: Process) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:

        def ask(budget: int | None, *, thinks: bool = True) -> Any:
            body: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": thinks}}
            if budget is not None:
                body["thinking_token_budget"] = budget
            return client.chat.completions.create(
                model=MODEL, messages=SUM, temperature=0, max_tokens=120, extra_body=body
            )

        def thought(answer: Any) -> int:
            return answer.usage.completion_tokens_details.reasoning_tokens  # type: ignore[no-any-return]

        free, cut, none = ask(None), ask(3), ask(0)
        assert thought(free) > thought(cut) > thought(none)
        assert all(x.choices[0].message.content for x in (free, cut, none))
        assert ask(50, thinks=False).choices[0].message.content
        assert thought(ask(2**40)) == thought(free)
        with pytest.raises(openai.BadRequestError, match="thinking_token_budget is -1") as error:
            ask(-1)
        assert error.value.param == "thinking_token_budget"


def test_other_names_of_the_budget(server: Process) -> None:
    """The Messages API's, and that of OpenRouter, which responses take as well."""
    spellings: list[tuple[str, dict[str, Any], str]] = [
        ("chat/completions", {"thinking": {"type": "enabled", "budget_tokens": 0}}, "messages"),
        ("chat/completions", {"reasoning": {"enabled": True, "max_tokens": 0}}, "messages"),
        ("messages", {"thinking": {"type": "enabled", "budget_tokens": 0}}, "messages"),
        ("responses", {"reasoning": {"enabled": True, "max_tokens": 0}}, "input"),
        ("messages", {"thinking": {"type": "enabled"}, "thinking_token_budget": 0}, "messages"),
        ("responses", {"reasoning": {"enabled": True}, "thinking_token_budget": 0}, "input"),
    ]
    for route, fields, name in spellings:
        limit = "max_output_tokens" if route == "responses" else "max_tokens"
        thoughts = []
        for budget in (0, 1000):
            options = {
                key: {k: budget if k.endswith("tokens") else v for k, v in value.items()}
                if isinstance(value, dict)
                else budget
                for key, value in fields.items()
            }
            body = {"model": MODEL, name: SUM, "temperature": 0, limit: 120, **options}
            answer = httpx.post(f"{server.url}/v1/{route}", json=body, timeout=60)
            assert answer.status_code == 200 and "42" in answer.text, answer.text
            thoughts.append(re.search(THOUGHT, answer.text) is not None)
        assert thoughts == [False, True], (route, fields)
    for route, name in (
        ("chat/completions", "messages"),
        ("messages", "messages"),
        ("responses", "input"),
    ):
        body = {"model": MODEL, name: SUM, "thinking_token_budget": -1, "max_tokens": 9}
        if route == "messages":
            body["thinking"] = {"type": "enabled"}
        answer = httpx.post(f"{server.url}/v1/{route}", json=body, timeout=60)
        assert answer.status_code == 400 and "thinking_token_budget is -1" in answer.text


def test_the_budget_beside_other_fields(server: Process) -> None:
    """A schema or a forced call begins where the thought was ended; a limit of tokens ends all."""
    schema = {
        "type": "object",
        "properties": {"answer": {"type": "integer"}},
        "required": ["answer"],
    }
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    body: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:

        def ask(budget: int, **options: Any) -> Any:
            options = {"max_tokens": 120, **options}
            extra = {**body, "thinking_token_budget": budget}
            return client.chat.completions.create(
                model=MODEL, messages=SUM, temperature=0, extra_body=extra, **options
            )

        for budget in (0, 3):
            answer = ask(budget, response_format=form)
            assert json.loads(answer.choices[0].message.content).keys() == {"answer"}
            assert answer.usage.completion_tokens_details.reasoning_tokens <= budget + 1
            answer = ask(budget, tools=[tool], tool_choice="required")
            assert answer.choices[0].message.tool_calls[0].function.name == "f"
        short = ask(1000, max_tokens=4)
        assert short.choices[0].finish_reason == "length" and not short.choices[0].message.content
        assert short.usage.completion_tokens_details.reasoning_tokens == 4


def test_each_of_several_outputs_has_the_budget(server: Process) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        body = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 2}
        stream = client.chat.completions.create(
            model=MODEL, messages=SUM, n=2, temperature=1, seed=1, max_tokens=60, stream=True,
            stream_options={"include_usage": True}, extra_body=body,
        )  # fmt: skip
        *_, last = stream
        details = last.usage and last.usage.completion_tokens_details
        assert details is not None and 0 < (details.reasoning_tokens or 0) <= 2 * 4  # with the tags


async def test_a_hint_that_cannot_be_kept_costs_nothing() -> None:
    keys = {"reasoning_parser": None, "tool_call_parser": None}
    chat = PreparedChat(
        prompt=Prompt(text="x", ids=[1]),
        params=SamplingParams(),
        conversation=Conversation(messages=[]),
        plugins=ParserPlugins(PluginManager(), None, keys),
    )
    for hint in (5, -1, None):
        assert await with_hint(chat, hint) is chat


def test_a_budget_of_a_text_is_refused(server: Process) -> None:
    body = {"model": MODEL, "prompt": "a", "thinking_token_budget": 5}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "thinking_token_budget")
    assert "send messages" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_what_of_the_reasoning_is_shown(server: Process, stream: bool) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:

        def ask(**body: Any) -> tuple[str, str]:
            """Return content and reasoning."""
            body["chat_template_kwargs"] = {"enable_thinking": True}
            answer: Any = client.chat.completions.create(
                model=MODEL,
                messages=SUM,
                temperature=0,
                max_tokens=120,
                stream=stream,
                extra_body=body,
            )
            parts = [c.choices[0].delta for c in answer] if stream else [answer.choices[0].message]
            texts = [(part.content or "", getattr(part, "reasoning", None) or "") for part in parts]
            return "".join(c for c, _ in texts), "".join(r for _, r in texts)

        content, reasoning = ask()
        assert content and reasoning and "<think>" not in content
        assert ask(include_reasoning=False) == (content, "")
        assert ask(reasoning={"exclude": True}) == (content, "")
        joined, apart = ask(separate_reasoning=False)
        assert not apart and reasoning in joined and joined.rstrip().endswith(content.strip())
