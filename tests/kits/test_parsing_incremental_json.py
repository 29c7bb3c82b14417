"""The kit's incremental JSON and the suite's check of JSON prefixes agree: they share no code."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.testing.json_prefix import is_json_prefix
from treadle_parsing_kit.incremental_json import IncrementalJson

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
OBJECTS = st.dictionaries(st.text(max_size=3), VALUES, max_size=3)


def accepts(text: str) -> bool:
    reader = IncrementalJson()
    end = reader.feed(text)
    pending = reader.pending
    return end == len(text) and not reader.failed and pending in (reader.close() or pending)


@settings(database=None)
@given(OBJECTS, st.integers(0, 200), st.booleans())
def test_the_beginning_of_an_object_is_accepted(value: object, length: int, ascii: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii)[:length]
    assert is_json_prefix(text)
    assert accepts(text)


@settings(database=None)
@given(OBJECTS, st.integers(0, 200), st.sampled_from('{}[]",:\\x0-.e nt'), st.integers(0, 200))
def test_what_is_returned_is_the_beginning_of_json(
    value: object, at: int, char: str, length: int
) -> None:
    text = json.dumps(value)
    text = (text[:at] + char + text[at + 1 :])[:length]
    reader = IncrementalJson()
    end = reader.feed(text)
    if is_json_prefix(text):
        assert end == len(text.rstrip()) if reader.done else end == len(text)
        assert not reader.failed
    assert is_json_prefix(reader.close())


@pytest.mark.parametrize("text", ['{"a": 1}}', "{]", '{"a" 1', '{"a": NaN', '{"a": "\n', "{,", "x"])
def test_what_no_json_begins_with_is_refused(text: str) -> None:
    assert not is_json_prefix(text)
