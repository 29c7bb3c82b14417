"""A grammar waits until the reasoning that the prompt has opened is over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from treadle import LLM, SamplingParams, StructuredOutputsParams
from treadle.errors import RequestError
from treadle.structured_output import StructuredOutputState

PLUGIN = '''
from treadle.api import impl

TREADLE = {"reasoning_parsers": ["three"]}

class Thinking:
    """Reasons from a "?" at the end of the prompt up to the third "Z"."""
    def __init__(self, prompt):
        self.in_reasoning = prompt.endswith("?")
        self.text = ""
    def feed(self, text, ids):
        assert len(ids) == 1
        self.text += text
        if self.text.count("Z") >= 3:
            self.in_reasoning = False
        return []
    def finish(self):
        return []

@impl
def treadle_reasoning_parser(name, tokenizer, prompt):
    return Thinking(prompt) if name == "three" else None
'''


@pytest.fixture(scope="module")
def llm(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    file = tmp_path_factory.mktemp("plugin") / "three.py"
    file.write_text(PLUGIN)
    options = {"cpu_threads": 1, "num_pages": 128, "plugin_file": [str(file)]}
    with LLM(model=str(folder), **options) as llm:
        yield llm


def outputs(llm: LLM, prompt: str, reasoning: str | None, count: int = 12) -> list[tuple[str, str]]:
    guided = StructuredOutputsParams(choice=["ja", "na"], reasoning=reasoning)
    params = [
        SamplingParams(
            temperature=2.0,
            seed=i,
            max_tokens=160,
            structured_outputs=guided,
            logit_bias={57: 4.0, 257: 8.0},
        )
        for i in range(count)
    ]
    results = llm.generate([prompt] * count, params, use_tqdm=False)
    return [(o.outputs[0].text, str(o.outputs[0].finish_reason)) for o in results]


def test_the_grammar_begins_where_the_reasoning_ends(llm: LLM) -> None:
    stopped = 0
    for text, reason in outputs(llm, "why?", "three"):
        if reason == "stop":
            stopped += 1
            thought, _, answer = text.rpartition("Z")
            assert thought.count("Z") == 2 and answer in ("ja", "na")
            assert len(thought) > 2
    assert stopped, "the end of the model would have ended it while it reasons"


def test_without_reasoning_it_holds_at_once(llm: LLM) -> None:
    for prompt, reasoning in (("why", "three"), ("why?", None)):
        for text, _ in outputs(llm, prompt, reasoning, 4):
            assert text in ("ja", "na")


class Abc:
    """A grammar of one text: the ids 1, 2 and 3."""

    position = 0

    def fill_bitmask(self, bitmask: torch.Tensor, row: int) -> None:
        bitmask[row].zero_()
        if self.position < 3:
            bitmask[row, 0] = 1 << (self.position + 1)

    def accept_token(self, token: int) -> bool:
        self.position += token == self.position + 1
        return True

    @property
    def is_accepting(self) -> bool:
        return self.position == 3

    is_terminated = is_accepting


OPENER, CLOSER, END = 40, 41, 0


def test_a_sequence_that_reasons_is_free_and_cannot_end() -> None:
    seen: list[int] = []

    def reasons(token: int) -> bool:
        seen.append(token)
        return len(seen) < 3

    guide = StructuredOutputState(Abc(), reasons)  # type: ignore[arg-type]
    mask = torch.zeros((1, 2), dtype=torch.int32)
    for token in (7, 8, 9):
        guide.fill_bitmask(mask, 0, (END,))
        assert mask.tolist() == [[~1, ~0]]
        guide.accept_token(token)
        assert not guide.has_ended
    guide.fill_bitmask(mask, 0, (END,))
    assert seen == [7, 8, 9] and mask.tolist() == [[1 << 1, 0]]


@pytest.mark.parametrize("thought", [[], [OPENER, 7, 7, CLOSER]])
def test_the_model_may_open_the_reasoning_itself(thought: list[int]) -> None:
    """Only at the beginning, and nothing may end before the grammar is complete."""
    guide = StructuredOutputState(Abc(), lambda token: token != CLOSER, OPENER)  # type: ignore[arg-type]
    mask = torch.zeros((1, 2), dtype=torch.int32)

    def allowed() -> set[int]:
        guide.fill_bitmask(mask, 0, (END,))
        return {i for i in range(64) if int(mask[0, i // 32]) >> (i % 32) & 1}

    assert allowed() == {1, OPENER}
    for token in thought:
        assert token in allowed()
        guide.accept_token(token)
        assert not guide.has_ended
        assert token == CLOSER or allowed() == set(range(1, 64))
    for token in (1, 2, 3):
        assert allowed() == ({token, OPENER} if not thought and token == 1 else {token})
        guide.accept_token(token)
    assert guide.has_ended and guide.error is None


def test_an_unknown_parser_is_an_error_of_the_request(llm: LLM) -> None:
    with pytest.raises(RequestError, match="nosuch"):
        outputs(llm, "why?", "nosuch", 1)
