"""From parameters to a grammar's source: what a client sent is handed on as it is."""

from __future__ import annotations

import json

from treadle.api.sampling_params import StructuredOutputsParams
from treadle.structured_output.spec import grammar_spec


def test_a_schema_is_not_changed() -> None:
    schema = {"type": "string", "pattern": r"\d"}
    grammar_spec(StructuredOutputsParams(json=schema))
    assert schema == {"type": "string", "pattern": r"\d"}


def test_patterns_are_handed_on() -> None:
    schema = {"type": "string", "pattern": r"^\d é$"}
    assert json.loads(grammar_spec(StructuredOutputsParams(json=schema)).source) == schema
    assert grammar_spec(StructuredOutputsParams(regex=r"^\d$")).source == r"^\d$"
