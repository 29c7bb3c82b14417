"""The steps that a start runs so that no request waits for a kernel."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from treadle.api.step_types import EngineInfo
from treadle.config import SchedulerConfig
from treadle.runner.model_runner import ModelRunner
from treadle_worker_kit.capture import MAX_PROMPT_TOKENS, bucket_sizes
from treadle_worker_kit.warm_up import run_step, warm_up_steps


def info(max_model_len: int) -> EngineInfo:
    return EngineInfo(
        model="m", architecture="a", dtype="float32", device="cuda", vocab_size=9, page_size=16,
        max_model_len=max_model_len, kv_cache_groups=[], num_async_steps=1, eos_token_ids=[],
        max_graph_tokens=MAX_PROMPT_TOKENS,
    )  # fmt: skip


@pytest.mark.parametrize("max_model_len", [2, 16, 300, 4096])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 256])
def test_steps_are_within_the_limits(max_model_len: int, max_num_seqs: int) -> None:
    limits = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=2048)
    steps = list(warm_up_steps(limits, info(max_model_len)))
    for step in steps:
        assert len(step.slots) == len(set(step.slots)) <= max_num_seqs
        assert sum(step.num_scheduled_tokens) == step.num_decodes + len(step.tokens) <= 2048
        assert all(count > 0 for count in step.num_scheduled_tokens)
        ends = zip(step.num_computed_tokens, step.num_scheduled_tokens, strict=True)
        assert all(start >= 0 and start + count <= max_model_len for start, count in ends)
    temperatures = {n.params.temperature for step in steps for n in step.new_sequences}
    if max_model_len > MAX_PROMPT_TOKENS and max_num_seqs > 2:
        assert temperatures == {0.0, 1.0}
        assert max(len(step.tokens) for step in steps) > MAX_PROMPT_TOKENS
        # Attention of short prompts is launched only where there are many.
        assert (
            min(max(s.num_scheduled_tokens) for s in steps if len(s.tokens) > 512) < 512
            or max_num_seqs < 9
        )


def test_sizes_end_at_the_largest() -> None:
    for size in (1, 3, 64, 500, 512, 700):
        sizes = bucket_sizes(size)
        assert sizes == sorted(set(sizes)) and sizes[-1] == size


def test_a_step_in_vain_that_fails_leaves_nothing() -> None:
    """What is compiled ahead may ask for numbers that nobody has computed."""
    runner = Mock(ModelRunner)
    runner.execute_model.side_effect = ValueError("no numbers")
    step = next(warm_up_steps(SchedulerConfig(), info(300)))
    with pytest.raises(ValueError, match="no numbers"):
        run_step(runner, step)
    calls = [call[0] for call in runner.method_calls]
    assert calls == ["execute_model", "discard", "free_slots"]
