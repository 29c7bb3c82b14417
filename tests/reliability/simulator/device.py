"""An executor without a model: its pages keep what was written, its sampler hashes what it reads."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from simulator.model import EOS, VOCAB, cell, choose, logprobs_of, next_hash, prompt_logprob
from simulator.world import World
from treadle.api.step_types import (
    EngineInfo,
    GrammarOutput,
    KVCacheGroup,
    ModelRunnerOutput,
    NewSequenceData,
    SchedulerOutput,
)
from treadle.errors import CheckpointError, EngineDeadError

__all__ = ("SimulatedExecutor",)


class SimulatedExecutor:
    """Executes steps as a device does: in order, knowing slots, page tables and last tokens only.

    A step takes its time from the launch, or from the end of the step before it. Faults: the start
    fails, a step fails, a row has no token, a worker dies, a step never ends.
    """

    def __init__(self, world: World, setup: Any) -> None:
        self.world, self.setup = world, setup
        self.size = setup.page_size
        self.windows = setup.windows
        slots = setup.max_num_seqs
        self.pages = [[[0] * self.size for _ in range(setup.num_pages)] for _ in self.windows]
        columns = -(-setup.max_model_len // self.size) + 1
        self.tables = [[[0] * columns for _ in range(slots)] for _ in self.windows]
        self.sequences: dict[int, NewSequenceData] = {}
        self.last: dict[int, int] = {}
        self._results: deque[tuple[float, ModelRunnerOutput]] = deque()
        self._deferred: SchedulerOutput | None = None
        self._ready_at = 0.0
        self.is_worker_dead = False
        self.num_shutdowns = 0

    def start(self) -> EngineInfo:
        seconds = self.world.random.random()
        self.world.run_until(self.world.now + seconds)
        self.setup.process.check_alive()
        if self.setup.fails_to_start:
            raise CheckpointError("the checkpoint is damaged")
        groups = [KVCacheGroup("full", w, self.setup.num_pages, 1, 1) for w in self.windows]
        return EngineInfo(
            model="simulated", architecture="Simulated", dtype="float32", device="none",
            vocab_size=VOCAB, max_model_len=self.setup.max_model_len, page_size=self.size,
            kv_cache_groups=groups, num_async_steps=self.setup.num_async_steps,
            eos_token_ids=[EOS],
        )  # fmt: skip

    # -- steps ---------------------------------------------------------------------------

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        step = scheduler_output
        self.setup.process.turns = 0
        for slot in step.freed_slots:
            self.last.pop(slot, None)
            self.sequences.pop(slot, None)
        for start in step.new_sequences:
            self.sequences[start.slot] = start
        for write in step.page_table_updates:
            end = write.start + len(write.pages)
            self.tables[write.group][write.slot][write.start : end] = write.pages
        if sum(step.num_scheduled_tokens) > self.setup.max_num_batched_tokens:
            self.world.fail(f"step {step.id} has {sum(step.num_scheduled_tokens)} tokens")
        known = iter(step.tokens)
        for row, (slot, start, count) in enumerate(
            zip(step.slots, step.num_computed_tokens, step.num_scheduled_tokens, strict=True)
        ):
            salt = self.sequences[slot].params.cache_salt
            for position in range(start, start + count):
                token = self.last[slot] if row < step.num_decodes else next(known)
                self._write(slot, position, cell(token, position, salt))
        if step.defer_sampling:
            self._deferred = step
        else:
            self._sample(step, {})

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> None:
        step, self._deferred = self._deferred, None
        assert step is not None
        masks: dict[int, list[int]] = {}
        if grammar_output is not None:
            octets = np.frombuffer(grammar_output.bitmask, dtype=np.uint8)
            bits = np.unpackbits(octets, bitorder="little").reshape(len(grammar_output.rows), -1)
            for row, allowed in zip(grammar_output.rows, bits[:, :VOCAB], strict=True):
                masks[row] = np.flatnonzero(allowed).tolist()
        self._sample(step, masks)

    def _sample(self, step: SchedulerOutput, masks: dict[int, list[int]]) -> None:
        draw = self.world.random.random
        tokens: list[int] = []
        logprobs: dict[int, Any] = {}
        prompt_logprobs: dict[int, Any] = {}
        invalid: list[int] = []
        row_errors: dict[int, str] = {}
        for row, (slot, start, count, samples) in enumerate(
            zip(
                step.slots, step.num_computed_tokens, step.num_scheduled_tokens,
                step.needs_sampling, strict=True,
            )
        ):  # fmt: skip
            sequence = self.sequences[slot]
            params, end = sequence.params, start + count
            is_new = len(sequence.token_ids) == sequence.num_prompt_tokens
            if (
                params.prompt_logprobs is not None
                and is_new
                and start < len(sequence.token_ids) - 1
            ):
                prompt_logprobs[row] = self._prompt_logprobs(slot, sequence, start, end)
            if not samples:
                continue
            groups = [self._read(group, slot, end) for group in range(len(self.windows))]
            value = next_hash(groups, sequence.seed if params.seed is not None else 0)
            allowed = masks.get(row)
            fault = allowed == [] or (self.setup.row_faults and draw() < 0.003)
            token = 0 if fault else choose(value, allowed)
            if fault:
                invalid.append(len(tokens))
                if allowed != []:
                    row_errors[len(tokens)] = "injected: the row failed"
            elif params.logprobs is not None:
                logprobs[row] = logprobs_of(value, token, params.logprobs)
            self.last[slot] = token
            tokens.append(token)
        result = ModelRunnerOutput(
            step.id, tokens, logprobs, prompt_logprobs, invalid, None, row_errors
        )
        if self.setup.step_faults and draw() < 0.01:
            self.world.log("step fails", step.id)
            result = ModelRunnerOutput(step.id, [], error="injected: the step failed")
        self._ready_at = (
            max(self._ready_at, self.world.now) + 0.001 + self._seconds_of(step) * draw()
        )
        self._results.append((self._ready_at, result))

    def _seconds_of(self, step: SchedulerOutput) -> float:
        return 0.005 + 0.0003 * sum(step.num_scheduled_tokens)

    def get_output(self) -> ModelRunnerOutput:
        ready_at, result = self._results.popleft()
        self.world.run_until(ready_at)
        self.setup.process.check_alive()
        if self.setup.is_hanging:
            self.world.log("step hangs", result.id)
            self.world.run_until(self.world.now + 1e7, lambda: self.setup.process.is_killed)
            self.setup.process.check_alive()
            self.world.fail("nobody has killed an engine that hangs")
        if self.is_worker_dead:
            raise EngineDeadError("injected: a worker has died")
        return result

    def check_health(self) -> None:
        if self.is_worker_dead:
            raise EngineDeadError("injected: a worker has died")

    def shutdown(self) -> None:
        self.num_shutdowns += 1
        if self.num_shutdowns > 1:
            self.world.fail("the executor was shut down twice")

    # -- pages ---------------------------------------------------------------------------

    def _write(self, slot: int, position: int, value: int) -> None:
        column, offset = divmod(position, self.size)
        for group, tables in enumerate(self.tables):
            page = tables[slot][column]
            if page == 0:
                self.world.fail(f"slot {slot} writes position {position} to the null page")
            self.pages[group][page][offset] = value

    def _read(self, group: int, slot: int, length: int) -> list[int]:
        """What the last of ``length`` tokens sees in a group, whatever lies in its pages."""
        window, pages = self.windows[group], self.pages[group]
        first = 0 if window is None else max(0, length - window)
        column = first // self.size
        cells: list[int] = []
        for page in self.tables[group][slot][column : -(-length // self.size)]:
            cells += pages[page]
        base = column * self.size
        return cells[first - base : length - base]

    def _prompt_logprobs(
        self, slot: int, sequence: NewSequenceData, start: int, end: int
    ) -> list[Any]:
        prompt = sequence.token_ids
        last = min(end, len(prompt) - 1)
        return [
            prompt_logprob(self._read(0, slot, p + 1)[-1], prompt[p + 1])
            for p in range(start, last)
        ]
