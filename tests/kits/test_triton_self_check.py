"""A kernel that is tried: what counts as passed, and what is said otherwise."""

import logging

import pytest

from treadle_triton_kit.self_check import self_check

log = logging.getLogger(__name__)


def raises() -> bool:
    raise OSError("no compiler")


def test_what_is_wrong_or_raises_does_not_pass(caplog: pytest.LogCaptureFixture) -> None:
    assert self_check(lambda: True, log, "none (%s)")
    assert not caplog.records
    assert not self_check(lambda: False, log, "none (%s)")
    assert not self_check(raises, log, "none (%s)")
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["none (its results are wrong)", "none (OSError: no compiler)"]


def test_who_stops_the_process_is_not_held_up() -> None:
    def interrupted() -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        self_check(interrupted, log, "none (%s)")
