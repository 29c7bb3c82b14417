"""Steps that are run at the start, so that no request waits for a kernel to be compiled."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.api.sampling_params import SamplingParams
from treadle.api.step_types import EngineInfo, NewSequenceData, SchedulerOutput
from treadle.config import SchedulerConfig
from treadle.runner.model_runner import ModelRunner

__all__ = ("run_step", "warm_up_steps")

CHUNKS = (8, 16, 32, 64)
"""Tokens of short prompts, and of prompts that go on behind a prefix: attention has kernels for each."""
MIN_PROMPT = 513
"""More tokens than a step has that is captured as a whole; whose attention is therefore launched."""
START = 1024
"""Tokens before decodes and chunks: kernels do not depend on it, but many rows at the end of a long
context would take seconds."""
GREEDY, RANDOM = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)
EDITED = tuple(SamplingParams(temperature=t, presence_penalty=0.5) for t in (0.0, 1.0))
PARAMS = ((GREEDY,), (RANDOM,), (GREEDY, RANDOM), *((params,) for params in EDITED), EDITED)
"""Of the rows, by turns: sampling has kernels for greedy rows, random ones and both, of logits as the
model makes them and of edited ones."""


def warm_up_steps(limits: SchedulerConfig, info: EngineInfo) -> Iterator[SchedulerOutput]:
    """Yield steps whose attention, or all of whose kernels, are launched: prompts beside few decodes, many
    and none; many short prompts; chunks behind a prefix.

    They read and write the null page, and all their tokens have the id 0.
    """
    last = info.max_model_len - 1
    start = min(START, last)

    def chunk(tokens: int, end: int = start) -> tuple[int, int]:
        return max(end - tokens, 0), min(tokens, end)

    room = limits.max_num_batched_tokens - CHUNKS[0] - 1
    long = (0, max(min(max(info.max_graph_tokens + 1, MIN_PROMPT), last, room), 1))
    most = min(limits.max_num_seqs - 2, limits.max_num_batched_tokens - long[1] - CHUNKS[0])
    shapes = [
        (rows, [chunk(CHUNKS[0], last), long], params)
        for rows in sorted({1, most})
        for params in PARAMS
    ]
    # Of few keys, which nothing splits: another kernel than that of as many tokens behind a prefix.
    shapes.append((0, [(0, min(CHUNKS[0], last))] * (MIN_PROMPT // CHUNKS[0] + 1), (GREEDY,)))
    for tokens in CHUNKS:
        shapes.append((0, [chunk(tokens)] * (MIN_PROMPT // tokens + 1), (GREEDY,)))
        shapes.append((0, [chunk(tokens, last), (0, min(MIN_PROMPT, last))], (GREEDY,)))
    for rows, chunks, params in shapes:
        num_tokens = rows + sum(count for _, count in chunks)
        num_rows = rows + len(chunks)
        if (
            rows >= 0
            and num_rows <= limits.max_num_seqs
            and num_tokens <= limits.max_num_batched_tokens
        ):
            yield _step([(start, 1)] * rows, chunks, params)


def run_step(runner: ModelRunner, step: SchedulerOutput) -> None:
    """Run a step whose output nobody reads. If it fails, nothing of it is left."""
    try:
        runner.execute_model(step)
    except BaseException:
        runner.discard()
        raise
    else:
        runner.get_output()
    finally:
        runner.free_slots(step.slots)


def _step(
    decodes: list[tuple[int, int]],
    chunks: list[tuple[int, int]],
    params: tuple[SamplingParams, ...],
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
                params=params[slot % len(params)],
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
