"""``thinking_token_budget`` of chats in Python: the demo model thinks for fewer tokens, and answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from treadle import LLM, AsyncLLM, ReasoningPart, SamplingParams
from treadle.config import PluginConfig
from treadle.errors import PluginLoadError, RequestError
from treadle.plugins import PluginManager
from treadle.testing.grammars import ByteTokenizer
from treadle.text.chat import Conversation, PreparedChat
from treadle.text.parser_plugins import ParserPlugins
from treadle.text.prompts import Prompt

SUM: Any = [{"role": "user", "content": "What is 12 plus 30?"}]
THINKS: Any = {"chat_template_kwargs": {"enable_thinking": True}}
FIELD = "thinking_token_budget"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(cpu_threads=1, num_pages=64) as llm:
        yield llm


def params(budget: int | None, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=120, thinking_token_budget=budget, **options)


def thought_of(llm: LLM, ids: list[int]) -> list[int]:
    """Return the tokens between the tags of an output."""
    encode = llm.get_tokenizer().encode
    (begin,), (end,) = (encode(tag, add_special_tokens=False) for tag in ("<think>", "</think>"))
    return ids[ids.index(begin) + 1 : ids.index(end)] if begin in ids else ids[: ids.index(end)]


def test_a_thought_is_cut(llm: LLM) -> None:
    """Each chat of a batch has its own budget; a larger one than the thought changes nothing."""
    budgets = [None, 3, 0, 100, 2**63 - 1]
    outputs = llm.chat([SUM] * 5, [params(b) for b in budgets], use_tqdm=False, **THINKS)
    free, cut, none, *large = (output.outputs[0] for output in outputs)
    thought = thought_of(llm, free.token_ids)
    assert 3 < len(thought) < 100
    assert thought_of(llm, cut.token_ids) == thought[:3]
    assert thought_of(llm, none.token_ids) == []
    assert none.reasoning is None or not none.reasoning.strip()
    assert all(output.token_ids == free.token_ids for output in large)
    assert all(o.content and o.finish_reason == "stop" for o in (free, cut, none))


def test_a_thought_of_a_stream_is_cut(llm: LLM) -> None:
    whole = llm.chat(SUM, params(3), use_tqdm=False, **THINKS)[0].outputs[0]
    parts = [
        part
        for output in llm.stream_chat(SUM, params(3, output_kind="delta"), **THINKS)
        for part in output.outputs[0].parts or ()
    ]
    reasoning = "".join(part.text for part in parts if isinstance(part, ReasoningPart))
    assert reasoning and reasoning == whole.reasoning


async def test_a_thought_is_cut_beside_an_event_loop() -> None:
    async with AsyncLLM(cpu_threads=1, num_pages=64) as engine:
        last: Any = None
        async for output in engine.chat(SUM, params(0), **THINKS):
            last = output.outputs[0]
        assert last.content and not (last.reasoning or "").strip()
        with pytest.raises(RequestError, match="send messages") as error:
            await engine.prepare("a text", params(5))
        assert error.value.param == FIELD


def test_a_model_that_does_not_think_needs_no_budget(llm: LLM) -> None:
    thinks_not: Any = {"chat_template_kwargs": {"enable_thinking": False}}
    free, cut = (
        llm.chat(SUM, params(budget), use_tqdm=False, **thinks_not)[0].outputs[0]
        for budget in (None, 0)
    )
    assert free.token_ids == cut.token_ids


def test_a_prompt_that_is_cut_counts_as_it_is(llm: LLM) -> None:
    """A chat of which only the last tokens are kept has its budget behind those."""
    chat = llm._prepare_chat(SUM, params(3, truncate_prompt_tokens=8), THINKS)
    assert len(chat.prompt.ids or ()) > 8
    assert (chat.params.extra_args or {})["thinking_budget"]["prompt_tokens"] == 8


def test_it_stands_beside_the_arguments_of_other_processors(llm: LLM) -> None:
    chat = llm._prepare_chat(SUM, params(3, extra_args={"other": {"a": 1}}), THINKS)
    assert set(chat.params.extra_args or ()) == {"other", "thinking_budget"}
    assert chat.params.thinking_token_budget is None


@pytest.mark.parametrize(
    ("budget", "message"),
    [(-1, "is -1; it must be in"), (2**63, "it must be in"), (1.5, "must be a whole number"),
     (True, "must be a whole number")],
)  # fmt: skip
def test_bad_values_are_refused(budget: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as error:
        SamplingParams(thinking_token_budget=budget)
    assert error.value.param == FIELD


def test_a_text_has_no_budget(llm: LLM) -> None:
    with pytest.raises(RequestError, match="thinking_token_budget is for chats") as error:
        llm.generate("a text", params(5))
    assert error.value.param == FIELD


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reasoning_parser": "none"}, "needs a reasoning parser"),
        ({"reasoning_parser": "granite"}, "granite names no tokens of this model that end"),
        (
            {"disable_plugin": ["treadle-thinking-budget"]},
            "needs a logits processor; from a clone: pip install .*thinking_budget",
        ),
    ],
)
def test_a_budget_that_cannot_be_kept_is_refused(options: Any, message: str) -> None:
    with LLM(cpu_threads=1, num_pages=64, **options) as llm:
        with pytest.raises(RequestError, match=message) as error:
            llm.chat(SUM, params(5), use_tqdm=False, **THINKS)
        assert error.value.param == FIELD
        assert llm.chat(SUM, params(None), use_tqdm=False)[0].outputs[0].content


def test_the_processor_is_configured_once() -> None:
    for options, names in (
        ({}, ["thinking_budget"]),
        ({"logits_processors": ["thinking_budget"]}, ["thinking_budget"]),
        ({"logits_processors": ["repetition_window"]}, ["repetition_window", "thinking_budget"]),
        ({"disable_plugin": ["logits_processors:thinking_budget"]}, []),
    ):
        engine = AsyncLLM(**options)  # type: ignore[arg-type]
        assert engine.config.plugins.logits_processors == names


def test_a_processor_that_nobody_names_is_idle(llm: LLM) -> None:
    """It makes no step defer its sampling, and no row is kept for it; a chat with a budget does both."""
    runner: Any = llm._core._executor._runner  # type: ignore[attr-defined]
    assert list(runner._processors) == ["thinking_budget"]
    for budget in (None, 5):
        steps = []
        for _ in llm.stream_chat(SUM, params(budget), **THINKS):
            defers = [sequence.defer_sampling for sequence in llm._core.scheduler.running]
            steps.append((bool(runner._processor_args), *defers))
        assert len(steps) > 5 and set(steps[:-1]) == {(budget is not None,) * 2}


PLUGIN = """
from treadle.api import impl

TREADLE = {"reasoning_parsers": ["faulty"]}


class Endless:
    in_reasoning = True

    def __init__(self, how):
        self.how = how

    def feed(self, text, ids):
        return []

    def finish(self):
        return []


class Thinks(Endless):
    @property
    def closing_tag(self):
        if self.how == "raise":
            raise KeyError("odd")
        return 5 if self.how == "number" else "a long tag"


@impl
def treadle_reasoning_parser(name, options):
    return (Endless if options["how"] == "none" else Thinks)(options["how"])
"""


@pytest.mark.fault("reasoning_parsers", "closing_tag")
@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("raise", PluginLoadError, "failed in closing_tag: KeyError: 'odd'"),
        ("number", PluginLoadError, "failed in closing_tag: TypeError: it returned 5"),
        ("text", RequestError, "the reasoning parser faulty names no tokens of this model"),
        ("none", RequestError, "the reasoning parser faulty names no tokens of this model"),
    ],
)
async def test_a_parser_that_cannot_say_how_thoughts_end_costs_the_request(
    how: str, error: type[Exception], message: str, tmp_path: Path
) -> None:
    file = tmp_path / "faulty_reasoning.py"
    file.write_text(PLUGIN)
    options = {"reasoning_parsers:faulty": {"how": how}}
    config = PluginConfig(plugin_file=[str(file)], plugin_options=options)
    tokenizer: Any = ByteTokenizer()
    keys = {"reasoning_parser": "faulty", "tool_call_parser": None}
    chat = PreparedChat(
        prompt=Prompt(text="x", ids=[1]),
        params=SamplingParams(),
        conversation=Conversation(messages=[]),
        plugins=ParserPlugins(PluginManager(config), tokenizer, keys),
    )
    with pytest.raises(error, match=message):
        await chat.plugins.with_thinking_budget(chat, 5)
