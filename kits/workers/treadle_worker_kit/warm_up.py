"""Steps that are run at the start, so that no request waits for a kernel to be compiled."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.api.sampling_params import SamplingParams
from treadle.api.step_types import EngineInfo, NewSequenceData, SchedulerOutput
from treadle.config import SchedulerConfig
from treadle.runner.model_runner import ModelRunner

__all__ = ("run_step", "warm_up_steps")

CHUNKS = (8, 16, 32, 64)
"""Tokens of prompts that go on behind a long prefix: attention has kernels for each of these sizes."""
TEMPERATURES = ((0.0,), (1.0,), (0.0, 1.0))
"""Of the rows, by turns: all greedy, all random, both."""


def warm_up_steps(limits: SchedulerConfig, info: EngineInfo) -> Iterator[SchedulerOutput]:
    """Yield steps that no CUDA graph is replayed for: prompts beside decodes, few rows and many.

    They read and write the null page, and all their tokens have the id 0.
    """
    last = info.max_model_len - 1
    prompt = min(info.max_graph_tokens + 1, last)
    short = min(CHUNKS[0], last)
    for rows in sorted({1, limits.max_num_seqs - 2}):
        for temperatures in TEMPERATURES:
            is_possible = rows + 2 <= limits.max_num_seqs
            if 0 < rows <= limits.max_num_batched_tokens - prompt - short and is_possible:
                chunks = [(last - short, short), (0, prompt)]
                yield _step([(last, 1)] * rows, chunks, temperatures)
    for chunk in (min(chunk, last) for chunk in CHUNKS):
        yield _step([], [(last - chunk, chunk)], (0.0,))


def run_step(runner: ModelRunner, step: SchedulerOutput) -> None:
    """Run a step whose output nobody reads."""
    runner.execute_model(step)
    runner.get_output()
    runner.free_slots(step.slots)


def _step(
    decodes: list[tuple[int, int]], chunks: list[tuple[int, int]], temperatures: tuple[float, ...]
) -> SchedulerOutput:
    """Return a step; each row has its number of computed tokens and that of scheduled ones."""
    rows = [*decodes, *chunks]
    return SchedulerOutput(
        id=0,
        slots=list(range(len(rows))),
        num_computed_tokens=[start for start, _ in rows],
        num_scheduled_tokens=[count for _, count in rows],
        num_decodes=len(decodes),
        tokens=[0] * sum(count for _, count in chunks),
        needs_sampling=[True] * len(rows),
        new_sequences=[
            NewSequenceData(
                slot=slot,
                params=SamplingParams(temperature=temperatures[slot % len(temperatures)]),
                num_prompt_tokens=1,
                token_ids=[0],
                seed=0,
                stop_token_ids=[],
                bad_words=[],
            )
            for slot in range(len(rows))
        ],
        freed_slots=[],
        page_table_updates=[],
    )
