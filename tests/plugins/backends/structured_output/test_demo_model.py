"""The demo model answers in the form that it is asked for, with each backend."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from treadle import LLM, SamplingParams, StructuredOutputsParams

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "people": {"type": "integer"},
        "kind": {"enum": ["town", "city", "village"]},
    },
    "required": ["city", "people", "kind"],
    "additionalProperties": False,
}
ASK = [{"role": "user", "content": "Describe Paris as JSON with city, people and kind."}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(model="demo:treadle-demo", cpu_threads=1, num_pages=128) as llm:
        yield llm


@pytest.mark.parametrize("backend", ["llguidance", "outlines", "lm-format-enforcer", "xgrammar"])
def test_it_answers_in_a_schema(llm: LLM, backend: str) -> None:
    guided = StructuredOutputsParams(json=CITY, backend=backend)
    params = [SamplingParams(max_tokens=200, temperature=0.0, structured_outputs=guided)]
    params += [
        SamplingParams(max_tokens=200, temperature=2.0, seed=i, structured_outputs=guided)
        for i in range(8)
    ]
    outputs = [
        o.outputs[0]
        for o in llm.chat(
            [ASK] * len(params),
            params,
            use_tqdm=False,
            chat_template_kwargs={"enable_thinking": False},
        )
    ]
    stopped = [o for o in outputs if o.finish_reason == "stop"]
    assert outputs[0] in stopped and len(stopped) >= 4
    for output in stopped:
        jsonschema.validate(json.loads(output.text), CITY)


@pytest.mark.parametrize("backend", ["llguidance", "outlines", "lm-format-enforcer", "xgrammar"])
def test_it_chooses(llm: LLM, backend: str) -> None:
    guided = StructuredOutputsParams(choice=["yes", "no", "I do not know"], backend=backend)
    params = [
        SamplingParams(max_tokens=30, temperature=2.0, seed=i, structured_outputs=guided)
        for i in range(8)
    ]
    for output in llm.chat(
        [ASK] * len(params), params, use_tqdm=False, chat_template_kwargs={"enable_thinking": False}
    ):
        assert output.outputs[0].text in guided.choice  # type: ignore[operator]
        assert output.outputs[0].finish_reason == "stop"


MARKERS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")


@pytest.mark.parametrize("backend", ["llguidance", "outlines", "lm-format-enforcer", "xgrammar"])
@pytest.mark.parametrize("form", ["{}", "a{}b", "{}user{}", "é{}!"])
def test_text_that_reads_like_a_special_token_is_text(llm: LLM, backend: str, form: str) -> None:
    """The token itself would end the output, or not be what the grammar asks for."""
    for marker in MARKERS:
        text = form.replace("{}", marker)
        for constraint in ({"choice": [text]}, {"json": {"const": text}}):
            guided = StructuredOutputsParams(backend=backend, **constraint)  # type: ignore[arg-type]
            params = SamplingParams(
                max_tokens=100,
                temperature=0.0,
                structured_outputs=guided,
                skip_special_tokens=False,
            )
            (answer,) = llm.generate("Say: ", params, use_tqdm=False)
            output = answer.outputs[0]
            assert output.finish_reason == "stop", output.error
            assert (json.loads(output.text) if "json" in constraint else output.text) == text
            assert llm.get_tokenizer().special_token_ids.isdisjoint(output.token_ids[:-1])
