"""While a step waits for its masks, the one before is read and the next is launched: nobody notices."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from treadle_repetition_window.processor import RepetitionWindow

from treadle.api.sampling_params import StructuredOutputsParams

WORDS = StructuredOutputsParams(regex="[a-z]{2} [a-z]{2}")
KINDS: list[dict[str, Any]] = [
    {"guided": WORDS},
    {"extra_args": {"repetition_window": {"ngram": 1}}, "temperature": 0.0},
    {"max_tokens": 7},
    {"guided": WORDS, "extra_args": {"repetition_window": {"ngram": 2}}},
]


def logged(name: str, method: Callable[..., Any], log: list[str]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        log.append(name)
        return method(*args)

    return call


def run(engine: Callable[..., Any], depth: int, log: list[str]) -> dict[str, list[int]]:
    """Return the tokens of sixteen requests that share two slots, with ``depth`` steps in flight."""
    driven = engine(max_num_seqs=2, logits_processors=["repetition_window"], max_step_ms=0)
    driven.core.info = msgspec.structs.replace(driven.core.info, num_async_steps=depth)
    executor = driven.core._executor
    for name in ("execute_model", "sample_tokens", "get_output"):
        setattr(executor, name, logged(name, getattr(executor, name), log))
    for number in range(16):
        params = {"max_tokens": 12, "ignore_eos": True, "seed": number} | KINDS[number % 4]
        driven.add(str(number), **params)
    for number in range(16):
        assert driven.until(str(number)).finish_reason in ("stop", "length")
    return driven.tokens  # type: ignore[no-any-return]


def test_tokens_do_not_depend_on_the_steps_in_flight(
    engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    seen: list[list[int]] = []
    apply = RepetitionWindow.apply

    def record(processor: Any, logits: Any, arguments: Any, tokens: Any) -> Any:
        seen.extend(map(list, tokens))
        return apply(processor, logits, arguments, tokens)

    monkeypatch.setattr(RepetitionWindow, "apply", record)
    tokens = run(engine, 1, log)
    assert tokens == run(engine, 0, [])
    # A processor sees what its own sequence has had, whoever had the slot before.
    texts = [[1, 2, 3, *ids] for ids in tokens.values()]
    assert seen
    assert all(any(text[: len(ids)] == ids for text in texts) for ids in seen)
    # What follows the tokens of a step at once is the next forward pass.
    following = [after for name, after in itertools.pairwise(log) if name == "sample_tokens"]
    assert following.count("execute_model") > 0.8 * len(following)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_request_that_is_aborted_leaves_the_next_step_alone(
    engine: Callable[..., Any], depth: int
) -> None:
    driven = engine(max_num_seqs=2)
    driven.core.info = msgspec.structs.replace(driven.core.info, num_async_steps=depth)
    for name in ("a", "b", "c"):
        driven.add(name, WORDS, max_tokens=12, ignore_eos=True)
    while len(driven.tokens["a"]) < 3:
        driven.step()
    driven.core.abort_requests(["a"])
    for name in ("b", "c"):
        assert driven.until(name).error is None
    while driven.core.has_work:
        driven.step()
    assert driven.core.stats.num_used_pages == 0
