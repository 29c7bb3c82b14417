"""treadle-demo: the checkpoint loads, is small, speaks its template, and answers held-out questions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from treadle.api.files import ModelRef
from treadle.api.kinds import MODEL_SOURCES
from treadle.errors import CheckpointError
from treadle.plugins import PluginManager

FOLDER = Path(__file__).parents[3] / "plugins" / "model_sources" / "demo"
MODEL = FOLDER / "treadle_demo" / "model"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather for a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    from transformers import LlamaForCausalLM

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield LlamaForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    torch.set_num_threads(before)


def reply(model: Any, tokenizer: Any, messages: list[dict[str, Any]] | str, **extra: Any) -> str:
    """A greedy answer, through transformers alone."""
    turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **extra)
    ids = tokenizer(text, return_tensors="pt").input_ids
    out = model.generate(
        ids, max_new_tokens=80, do_sample=False, temperature=None, top_p=None, top_k=None
    )
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def test_the_files_fit_in_a_repository() -> None:
    sizes = {path.name: path.stat().st_size for path in MODEL.iterdir()}
    assert sum(sizes.values()) <= 16 * 1024 * 1024
    assert set(sizes) == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_treadle_model_source_finds_the_model() -> None:
    source = PluginManager().create(MODEL_SOURCES, "demo")
    files = source.resolve(ModelRef("demo", "treadle-demo"), patterns=("*.json", "*.safetensors"))
    assert files.config["architectures"] == ["LlamaForCausalLM"]
    assert "model.safetensors" in files.names
    assert "chat_template.jinja" not in files.names
    with pytest.raises(CheckpointError, match="demo:treadle-demo"):
        source.resolve(ModelRef("demo", "other"), patterns=("*",))
    with pytest.raises(CheckpointError, match="revision"):
        source.resolve(ModelRef("demo", "treadle-demo", "v2"), patterns=("*",))


def test_the_hook_answers_only_its_scheme() -> None:
    import treadle_demo

    assert treadle_demo.treadle_model_source("hf") is None


def test_the_weights_are_bfloat16_and_tied(model: Any) -> None:
    from safetensors import safe_open

    with safe_open(MODEL / "model.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_tokens_survive_as_they_should(tokenizer: Any) -> None:
    assert len(tokenizer("1234").input_ids) == 4
    text = "<think>\nab</think> <tool_call>{}</tool_call>"
    ids = tokenizer(text + "<|im_end|>").input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    odd = 'naïve 漢字 \U0001f600\n\n  {"a": [1.5]}'
    assert tokenizer.decode(tokenizer(odd).input_ids) == odd


def test_the_template_shows_tools_results_and_thinking(tokenizer: Any) -> None:
    call = {
        "type": "function",
        "function": {"name": "get_weather", "arguments": {"city": "Oslo"}},
    }
    messages = [
        {"role": "system", "content": "Be polite."},
        {"role": "user", "content": "Weather in Oslo?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "sunny"},
    ]
    text = tokenizer.apply_chat_template(
        messages, tools=[WEATHER], tokenize=False, add_generation_prompt=True
    )
    assert text.startswith("<|im_start|>system\nBe polite.\n\n")
    assert f"<tools>\n{json.dumps(WEATHER)}\n</tools>" in text
    assert (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>' in text
    )
    assert text.endswith(
        "<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    hello = [{"role": "user", "content": "Hello"}]
    options = {"tokenize": False, "add_generation_prompt": True}
    on = tokenizer.apply_chat_template(hello, enable_thinking=True, **options)
    off = tokenizer.apply_chat_template(hello, enable_thinking=False, **options)
    assert "Think before you answer." in on
    assert off.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_earlier_reasoning_is_not_repeated_to_the_model(tokenizer: Any) -> None:
    messages = [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "<think>\nhmm\n</think>\n\n4."},
        {"role": "user", "content": "Sure?"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert "hmm" not in text
    assert "<|im_start|>assistant\n4.<|im_end|>" in text


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("I'd like to run treadle as a server.", ("treadle serve", "http://localhost:8000/v1")),
        ("what do i have to type to get treadle installed", ("pip install -c constraints.txt .",)),
        ("How might I chat with treadle?", ("treadle chat",)),
        ("How does one generate text here?", ("treadle generate --prompt",)),
        ("Teach me about paged attention.", ("page table",)),
        ("Which town serves as the capital of France?", ("Paris",)),
        ("Could you multiply 7 and 8 for me?", ("56",)),
        ("Which colour would you say a lemon is?", ("yellow",)),
        ("Who painted the Mona Lisa?", ("don't know",)),
    ],
)
def test_it_answers_what_it_was_not_trained_on(
    model: Any, tokenizer: Any, question: str, words: tuple[str, ...]
) -> None:
    text = reply(model, tokenizer, question)
    assert all(word in text for word in words), text
    assert "<think>" not in text


def test_it_calls_a_tool_and_uses_the_result(model: Any, tokenizer: Any) -> None:
    question = {"role": "user", "content": "How's the weather over in Brunswick?"}
    text = reply(model, tokenizer, [question], tools=[WEATHER])
    match = re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", text)
    assert match, text
    called = json.loads(match[1])
    assert called == {"name": "get_weather", "arguments": {"city": "Brunswick"}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": called}]}
    result = {"role": "tool", "content": '{"temperature": 17, "condition": "cloudy"}'}
    text = reply(model, tokenizer, [question, call, result], tools=[WEATHER])
    assert "17" in text
    assert "cloudy" in text


def test_it_thinks_when_it_is_told_to(model: Any, tokenizer: Any) -> None:
    text = reply(model, tokenizer, "What do 29 and 47 sum to?", enable_thinking=True)
    assert re.fullmatch(r"<think>\n.+\n</think>\n\n.*76\.", text, re.DOTALL), text


def test_it_answers_in_json(model: Any, tokenizer: Any) -> None:
    text = reply(
        model, tokenizer, "What is the capital of Peru? Answer in JSON with keys country, capital."
    )
    assert json.loads(text) == {"country": "Peru", "capital": "Lima"}


def test_it_continues_plain_text(model: Any, tokenizer: Any) -> None:
    ids = tokenizer("treadle is", return_tensors="pt").input_ids
    out = model.generate(
        ids, max_new_tokens=30, do_sample=False, temperature=None, top_p=None, top_k=None
    )
    assert "engine" in tokenizer.decode(out[0])


def test_training_and_evaluation_share_no_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    import random

    from training.chat import Text
    from training.data import normal, sample
    from training.heldout import forbidden

    rng = random.Random(4)
    for example in (sample(rng) for _ in range(2000)):
        if not isinstance(example, Text):
            questions = {normal(str(m["content"])) for m in example.messages if m["role"] == "user"}
            assert not questions & forbidden()
