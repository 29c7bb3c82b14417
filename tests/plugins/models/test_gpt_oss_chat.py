"""Chats with GPT-OSS: thoughts, forms and calls of a model that writes its messages in Harmony's format.

The weights are random: whatever is written in between, what is promised of an answer must hold.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from treadle import LLM, SamplingParams, StructuredOutputsParams
from treadle.testing.checkpoints import make_checkpoint

TAGS = ("start", "end", "message", "channel", "constrain", "return", "call")
TEMPLATE = """{% for m in messages %}{{ "<|start|>" + m.role }}
{%- if m.role == "assistant" %}<|channel|>final{% endif %}{{ "<|message|>" + m.content + "<|end|>" }}
{%- endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"""
SCHEMA: Any = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {"name": "get_a", "parameters": SCHEMA, "strict": True},
}
USER: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    sizes: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16}
    folder = make_checkpoint(
        tmp_path_factory.mktemp("model"), "GptOssForCausalLM", tokenizer=True, **sizes
    )
    name_tokens(folder)
    options: dict[str, Any] = {"num_pages": 128, "max_model_len": 512}
    with LLM(str(folder), device="cpu", cpu_threads=1, **options) as llm:
        yield llm


def name_tokens(folder: Path) -> None:
    """Give the tokenizer the tags of the format, and the model their ids as ends."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    added = [t for t in tokenizer["added_tokens"] if t["content"] != "<|end|>"]
    first = max(t["id"] for t in added) + 1
    names = [f"<|{tag}|>" for tag in TAGS]
    tokenizer["added_tokens"] = added + [
        {**added[0], "id": first + i, "content": name, "special": True}
        for i, name in enumerate(names)
    ]
    path.write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    config = json.loads((folder / "config.json").read_text())
    ends = [first + TAGS.index("return"), first + TAGS.index("call")]
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": ends}))


def test_an_answer_has_its_form_whatever_stands_before_it(llm: LLM) -> None:
    """Also if the model writes no header: nothing comes before the first one but the answer itself."""
    form = StructuredOutputsParams(json=SCHEMA)
    params = [
        SamplingParams(temperature=1.5, seed=i, max_tokens=200, structured_outputs=form)
        for i in range(12)
    ]
    outputs = llm.chat([USER] * len(params), params, use_tqdm=False)
    ended = [o.outputs[0] for o in outputs if o.outputs[0].finish_reason == "stop"]
    assert ended and all(json.loads(o.content)["a"] in range(10) for o in ended)


def test_a_call_is_made_and_nothing_of_it_is_text(llm: LLM) -> None:
    for i in range(6):
        params = SamplingParams(temperature=1.5, seed=i, max_tokens=300)
        (output,) = llm.chat(USER, params, tools=[TOOL], tool_choice="required", use_tqdm=False)
        answer = output.outputs[0]
        if answer.finish_reason == "tool_calls":
            (made,) = answer.tool_calls
            assert made.name == "get_a" and json.loads(made.arguments)["a"] in range(10)
            assert "functions." not in (answer.content or "")


@pytest.mark.parametrize("form", [{"enum": ["x"]}, None])
@pytest.mark.parametrize(
    "before", ["", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"]
)
def test_a_call_that_the_model_opens_obeys_its_function(llm: LLM, form: Any, before: str) -> None:
    """Not the form of the answer, nor nothing at all: the header is a part of the grammar."""
    header = f"{before}<|channel|>commentary to=functions.get_a <|constrain|>json<|message|>"
    for i in range(4):
        answer = ask(llm, header, form, i)
        assert (answer.reasoning or "") == "hm" * bool(before)
        (made,) = answer.tool_calls
        assert made.name == "get_a" and made.arguments.startswith('{"a": ')
        if answer.finish_reason == "tool_calls":
            assert json.loads(made.arguments)["a"] in range(10) and not answer.content


def test_an_answer_beside_tools_has_its_form(llm: LLM) -> None:
    for before in ("", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"):
        answer = ask(llm, f"{before}<|channel|>final<|message|>", {"enum": ["x"]}, 0)
        assert answer.finish_reason == "stop" and answer.content == '"x"'
        assert (answer.reasoning or "") == "hm" * bool(before) and not answer.tool_calls


def ask(llm: LLM, begins: str, form: Any, seed: int) -> Any:
    """Return the answer of a model that is made to begin so, and may call ``get_a``."""
    tokenizer: Any = llm.get_tokenizer()
    prompt: Any = llm._prepare_chat(USER, SamplingParams(), {"tools": [TOOL]}).prompt
    forced = tokenizer.encode(begins, add_special_tokens=False)
    budget = {"max_tokens": 0, "prompt_tokens": len(prompt.ids), "end": forced}
    params = SamplingParams(
        temperature=1.5,
        seed=seed,
        max_tokens=150,
        structured_outputs=None if form is None else StructuredOutputsParams(json=form),
        extra_args={"thinking_budget": budget},
    )
    (output,) = llm.chat(USER, params, tools=[TOOL], use_tqdm=False)
    return output.outputs[0]


def test_a_budget_counts_behind_the_header_of_a_thought(llm: LLM) -> None:
    """Whose tags do not end it, as they do in other messages."""

    params = SamplingParams(max_tokens=60, thinking_token_budget=5)
    chat: Any = llm._prepare_chat(USER, params, {})
    arguments = chat.params.extra_args["thinking_budget"]
    tokenizer: Any = llm.get_tokenizer()

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)  # type: ignore[no-any-return]

    assert arguments["begin"] == ids("<|channel|>analysis<|message|>")
    assert arguments["end"] == ids("<|end|><|start|>assistant<|channel|>final<|message|>")
    assert not {*ids("<|channel|><|message|>")} & {*arguments["stops"]}
    assert {*ids("<|start|><|return|><|call|>")} <= {*arguments["stops"]}
    # A model that opens its thought, as it was taught: the header is forced here.
    from treadle_thinking_budget.processor import Arguments, forced_id

    budget = Arguments(**arguments)
    written = [*chat.prompt.ids, *arguments["begin"], *ids("hm, I")]
    assert forced_id(budget, written) == arguments["end"][0]
    assert forced_id(budget, written[:-1]) is None
    answered = [*chat.prompt.ids, *ids("<|channel|>final<|message|>hm, I think")]
    assert all(forced_id(budget, answered[:end]) is None for end in range(len(answered) + 1))
