"""Integers that do not fit into 64 bits are refused at the door, wherever they stand."""

from __future__ import annotations

import pytest

from treadle_server.decode import check_numbers
from treadle_server.errors import APIError

MAX = 2**64 - 1


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": 1%s}' % (b"0" * 20),
        b'{"a": -9223372036854775809}',
        b"[%d]" % (MAX + 1),
        b'{"a": {"b": ["x\\"9", %s]}}' % (b"9" * 400),
        b'{"a\\\\": 1%s, "b": "2"}' % (b"0" * 5_000),
        b"1" + b"0" * 1_000_000,
    ],
)
def test_a_huge_integer_is_refused(body: bytes) -> None:
    with pytest.raises(APIError) as exc_info:
        check_numbers(body)
    assert (exc_info.value.status, exc_info.value.detail.code) == (400, "integer_out_of_range")
    assert len(exc_info.value.detail.message) < 200


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": %d, "b": -9223372036854775808}' % MAX,
        b'{"a": "1%s"}' % (b"0" * 400),
        b'{"1%s": 1}' % (b"0" * 40),
        b'{"a": 0.1%s, "b": 1%s.5, "c": 1%se-300}' % (b"0" * 40, b"0" * 30, b"0" * 30),
        b'{"a": "\\"1%s"}' % (b"0" * 40),
        b"",
    ],
)
def test_text_floats_and_small_integers_pass(body: bytes) -> None:
    check_numbers(body)
