"""Thoughts that end after a number of tokens: which id is forced, and a model that thinks."""

from __future__ import annotations

from typing import Any

import pytest
from treadle_thinking_budget.processor import Arguments, forced_id

from treadle import LLM, SamplingParams
from treadle.errors import RequestError

SUM: Any = [{"role": "user", "content": "What is 12 plus 30?"}]
OPEN, CLOSE, CALL = 90, 91, 92
# Arguments, tokens behind a prompt of two, the id that must follow.
CASES: list[tuple[dict[str, Any], list[int], int | None]] = [
    ({"max_tokens": 2}, [], None),
    ({"max_tokens": 2}, [1], None),
    ({"max_tokens": 2}, [1, 2], CLOSE),
    ({"max_tokens": 2}, [1, 2, CLOSE], None),
    ({"max_tokens": 2}, [1, CLOSE, 3], None),
    ({"max_tokens": 2}, [1, CLOSE], None),
    ({"max_tokens": 0}, [], CLOSE),
    ({"max_tokens": 2, "stops": [CALL]}, [CALL, 2], None),
    ({"max_tokens": 2, "begin": OPEN}, [1, 2], None),
    ({"max_tokens": 2, "begin": OPEN}, [OPEN, 1], None),
    ({"max_tokens": 2, "begin": OPEN}, [OPEN, 1, 2], CLOSE),
    ({"max_tokens": 2, "begin": OPEN}, [7, OPEN, 1, 2], CLOSE),
    ({"max_tokens": 2, "begin": OPEN}, [*range(10), OPEN, 1, 2], None),
    ({"max_tokens": 1, "begin": OPEN, "prompt_tokens": None}, [9, CLOSE, OPEN, 1], CLOSE),
    ({"max_tokens": 1, "begin": OPEN, "prompt_tokens": None}, [9, CLOSE, 1], None),
    ({"max_tokens": 1, "begin": [OPEN, 7, 8]}, [OPEN, 7, 8, 1], CLOSE),
    ({"max_tokens": 1, "begin": [OPEN, 7, 8]}, [3, OPEN, 7, 8, 1], CLOSE),
    ({"max_tokens": 0, "begin": [OPEN, 7, 8]}, [OPEN, 7, 8], CLOSE),
    ({"max_tokens": 0, "begin": [OPEN, 7, 8]}, [OPEN, 7], None),
    ({"max_tokens": 1, "begin": [OPEN, 7, 8]}, [OPEN, 6, 8, 1], None),
    ({"max_tokens": 1, "begin": [OPEN, 7, 8]}, [OPEN, 7, 8, 1, 2], None),
    ({"max_tokens": 1, "end": [CLOSE, 5, 6]}, [1], CLOSE),
    ({"max_tokens": 1, "end": [CLOSE, 5, 6]}, [1, CLOSE], 5),
    ({"max_tokens": 1, "end": [CLOSE, 5, 6]}, [1, CLOSE, 5], 6),
    ({"max_tokens": 1, "end": [CLOSE, 5, 6]}, [1, CLOSE, 5, 6], None),
    ({"max_tokens": 1, "end": [CLOSE, 5, 6]}, [1, 4], None),
]


@pytest.mark.parametrize(("given", "tokens", "forced"), CASES, ids=range(len(CASES)))
def test_which_id_is_forced(given: dict[str, Any], tokens: list[int], forced: int | None) -> None:
    arguments = Arguments(**{"end": [CLOSE], "prompt_tokens": 2, **given})
    assert forced_id(arguments, [CLOSE, OPEN, *tokens]) == forced


def test_a_thought_is_cut_in_python() -> None:
    with LLM(cpu_threads=1, num_pages=64, logits_processors=["thinking_budget"]) as llm:
        tokenizer = llm.get_tokenizer()
        (begin,), (end,) = (
            tokenizer.encode(tag, add_special_tokens=False) for tag in ("<think>", "</think>")
        )

        def answer(budget: int | None) -> Any:
            arguments = {"max_tokens": budget, "end": [end], "begin": begin}
            extra = None if budget is None else {"thinking_budget": arguments}
            params = SamplingParams(temperature=0, max_tokens=120, extra_args=extra)
            options: Any = {"chat_template_kwargs": {"enable_thinking": True}, "use_tqdm": False}
            return llm.chat(SUM, params, **options)[0].outputs[0]

        free, cut = answer(None), answer(3)
        thought = free.token_ids.index(end) - free.token_ids.index(begin) - 1
        assert thought > 3 and free.reasoning.startswith(cut.reasoning.rstrip())
        assert cut.token_ids.index(end) - cut.token_ids.index(begin) - 1 == 3
        assert cut.content and cut.finish_reason == "stop"
        assert answer(thought + 5).token_ids == free.token_ids
        with pytest.raises(RequestError, match="thinking_budget: Expected `int` >= 0"):
            answer(-1)
