"""A runner without a model: its cache stores what was written, its sampler hashes what it reads."""

from __future__ import annotations

from collections import deque
from typing import Any

from treadle.api.step_types import KVCacheGroup, ModelRunnerOutput, SchedulerOutput

Cell = tuple[int, int, str | None]  # token, position, salt
VOCAB = 1000


class ForeignRead(Exception):
    """A sequence read a cell that another sequence, or nobody, has written."""


def next_token(cells: list[Cell]) -> int:
    """The "model": any wrong, missing or reordered cell changes the token."""
    value = 0
    for token, position, salt in cells:
        value = (value * 1_000_003 + token * 31 + position * 7 + (len(salt) if salt else 0)) % 2**61
    return value % VOCAB


def visible(window: int | None, length: int) -> range:
    """Positions that the last of ``length`` tokens looks at."""
    return range(0 if window is None else max(0, length - window), length)


def forced_after(token: int) -> list[int]:
    """What the "grammar" leaves no choice about after a token."""
    return [(token * 7 + i) % VOCAB for i in range(token % 9)]


def oracle(
    prompt: list[int], salt: str | None, windows: list[int | None], count: int, jumps: bool = False
) -> list[int]:
    """What the "model" generates for a sequence that is alone and has endless memory."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        cells = [(tokens[p], p, salt) for window in windows for p in visible(window, len(tokens))]
        tokens.append(next_token(cells))
        tokens += forced_after(tokens[-1]) if jumps else ()
    return tokens[len(prompt) : len(prompt) + count]


class FakeRunner:
    """Executes scheduler outputs as a device would: in order, knowing pages and slots only."""

    def __init__(self, groups: list[KVCacheGroup], page_size: int, slots: int) -> None:
        self.groups = groups
        self.page_size = page_size
        self.cells: list[dict[tuple[int, int], Cell]] = [{} for _ in groups]
        self.tables: list[list[dict[int, int]]] = [[{} for _ in range(slots)] for _ in groups]
        self.last: dict[int, int] = {}
        self.salts: dict[int, str | None] = {}
        self.prompts: dict[int, int] = {}
        self.queue: deque[ModelRunnerOutput] = deque()
        self.read_cells = 0

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        for slot in scheduler_output.freed_slots:
            self.last.pop(slot, None)
            self.salts.pop(slot, None)
            self.prompts.pop(slot, None)
        for start in scheduler_output.new_sequences:
            assert start.slot not in self.salts, "the slot of another sequence"
            self.salts[start.slot] = start.params.cache_salt
            if start.params.prompt_logprobs and len(start.token_ids) == start.num_prompt_tokens:
                self.prompts[start.slot] = start.num_prompt_tokens
        for write in scheduler_output.page_table_updates:
            for i, page in enumerate(write.pages):
                self.tables[write.group][write.slot][write.start + i] = page
        prefill_tokens = iter(scheduler_output.tokens)
        rows = list(
            zip(
                scheduler_output.slots,
                scheduler_output.num_computed_tokens,
                scheduler_output.num_scheduled_tokens,
                scheduler_output.needs_sampling,
                strict=True,
            )
        )
        for row, (slot, start, count, _) in enumerate(rows):
            for position in range(start, start + count):
                token = (
                    self.last[slot] if row < scheduler_output.num_decodes else next(prefill_tokens)
                )
                self._write(slot, position, (token, position, self.salts[slot]))
        tokens = []
        for slot, start, count, samples in rows:
            if samples:
                self.last[slot] = next_token(self._read(slot, start + count))
                tokens.append(self.last[slot])
        # In place of logprobs, the positions of the prompt's tokens that they are of.
        prompt_logprobs: Any = {
            row: list(range(start + 1, min(start + count + 1, self.prompts[slot])))
            for row, (slot, start, count, _) in enumerate(rows)
            if slot in self.prompts
        }
        self.queue.append(
            ModelRunnerOutput(
                id=scheduler_output.id, sampled_token_ids=tokens, prompt_logprobs=prompt_logprobs
            )
        )

    def get_output(self) -> ModelRunnerOutput:
        return self.queue.popleft()

    def _write(self, slot: int, position: int, cell: Cell) -> None:
        column, offset = divmod(position, self.page_size)
        for group in range(len(self.groups)):
            page = self.tables[group][slot][column]
            if page == 0:
                raise ForeignRead(f"slot {slot} writes position {position} to the null page")
            self.cells[group][page, offset] = cell

    def _read(self, slot: int, length: int) -> list[Cell]:
        cells = []
        for group, cache_group in enumerate(self.groups):
            for position in visible(cache_group.window, length):
                column, offset = divmod(position, self.page_size)
                cell = self.cells[group].get((self.tables[group][slot][column], offset))
                if cell is None or cell[1:] != (position, self.salts[slot]):
                    raise ForeignRead(f"slot {slot} reads {cell} at position {position}")
                cells.append(cell)
        self.read_cells += len(cells)
        return cells
