"""Masks that captured graphs read from a fixed place reach the rows that they are for."""

from __future__ import annotations

import json

import pytest
from jsonschema import validate

from treadle import LLM, SamplingParams
from treadle.api.sampling_params import StructuredOutputsParams

pytestmark = pytest.mark.gpu


def schema(row: int) -> dict[str, object]:
    """Another property for each row."""
    text = {"type": "string", "maxLength": 12}
    return {
        "type": "object",
        "properties": {
            f"name {row}": text,
            "age": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": [f"name {row}", "age"],
        "additionalProperties": False,
    }


@pytest.mark.parametrize("every", [1, 3], ids=["all rows", "each third row"])
@pytest.mark.parametrize("top_k", [0, 20])
def test_each_row_gets_its_own_mask(every: int, top_k: int) -> None:
    masked = range(0, 24, every)
    params = [
        SamplingParams(
            temperature=0.9 if row % 2 else 0.0,
            top_k=top_k,
            max_tokens=100,
            structured_outputs=(
                StructuredOutputsParams(json=json.dumps(schema(row)), whitespace_pattern="")
                if row in masked
                else None
            ),
        )
        for row in range(24)
    ]
    with LLM(model="demo:treadle-demo", device="cuda") as llm:
        outputs = llm.generate([f"Number {row}: " for row in range(24)], params, use_tqdm=False)
        assert llm.info.max_graph_tokens, "nothing was captured"
    for row, output in enumerate(outputs):
        completion = output.outputs[0]
        if row in masked:
            assert completion.finish_reason == "stop"
            validate(json.loads(completion.text), schema(row))
        else:
            assert not completion.text.lstrip().startswith("{")
