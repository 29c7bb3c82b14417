"""A logits processor from end to end: what it bans, what it refuses, and that others don't notice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from treadle_repetition_window.processor import banned

from treadle import LLM, SamplingParams
from treadle.errors import RequestError
from treadle.testing.checkpoints import make_checkpoint


@pytest.mark.parametrize(
    ("tokens", "ngram", "window", "expected"),
    [
        ([1, 2, 3, 1, 2], 3, 0, {3}),
        ([1, 2, 3, 1, 2, 4, 1, 2], 3, 0, {3, 4}),
        ([1, 2, 3, 1, 2, 4, 1, 2], 3, 5, {4}),
        ([1, 2, 3], 1, 2, {2, 3}),
        ([1], 3, 0, set()),
        ([], 2, 0, set()),
        ([5, 5], 2, 0, {5}),
    ],
)
def test_banned(tokens: list[int], ngram: int, window: int, expected: set[int]) -> None:
    assert banned(tokens, ngram, window) == expected


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = make_checkpoint(tmp_path_factory.mktemp("tiny"), "LlamaForCausalLM")
    with LLM(str(folder), logits_processors=["repetition_window"], cpu_threads=1) as engine:
        yield engine


def ngrams(tokens: list[int], n: int) -> list[tuple[int, ...]]:
    return [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]


def test_no_ngram_repeats_and_others_are_left_alone(llm: LLM) -> None:
    # A bias makes two tokens so likely that a plain request repeats them at once.
    plain = SamplingParams(
        temperature=0, max_tokens=40, ignore_eos=True, logit_bias={7: 50.0, 9: 50.0}
    )
    guarded = plain.replace(extra_args={"repetition_window": {"ngram": 2}})
    prompts = [[1, 2, 3], [1, 2, 3]]
    free, restricted = llm.generate(prompts, [plain, guarded], use_tqdm=False)
    reference = llm.generate([prompts[0]], plain, use_tqdm=False)[0]
    assert free.outputs[0].token_ids == reference.outputs[0].token_ids
    assert len(set(ngrams(free.outputs[0].token_ids, 2))) < 10
    token_ids = prompts[1] + restricted.outputs[0].token_ids
    assert len(set(ngrams(token_ids, 2))) == len(ngrams(token_ids, 2))


@pytest.mark.parametrize(
    ("extra_args", "message"),
    [
        ({"repetition_window": {"ngram": 0}}, "ngram is 0; 1 to 64"),
        ({"repetition_window": {"window": -1}}, "window is -1"),
        ({"repetition_window": {"size": 1}}, "unknown field `size`"),
        ({"repetition_window": 3}, "Expected `object`"),
        ({"other": {}}, "'other', which is neither a logits processor of this engine"),
    ],
)
def test_bad_arguments_are_refused(llm: LLM, extra_args: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as exc_info:
        llm.generate([[1]], SamplingParams(extra_args=extra_args), use_tqdm=False)
    assert exc_info.value.param == "extra_args"
