"""A step while it is being scheduled and in flight."""

from __future__ import annotations

from operator import attrgetter

from treadle.api.step_types import NewSequenceData, PageTableUpdate, SchedulerOutput, TokenLogprobs
from treadle.scheduler.sequence import SequenceState

__all__ = ("InFlightStep",)

_num_computed_tokens_of = attrgetter("num_computed_tokens")


class InFlightStep:
    """Rows of a step in the order of ``SchedulerOutput``: decodes first, then prefill chunks."""

    def __init__(self, step_id: int) -> None:
        self.id = step_id
        self.sequences: list[SequenceState] = []
        self.preempted: set[SequenceState] = set()
        """Sequences that have lost their pages since the step was scheduled."""
        self.num_decodes = 0
        self.num_computed_tokens: list[int] = []
        self.num_scheduled_tokens: list[int] = []
        self.needs_sampling: list[bool] = []
        self.prompt_logprobs: list[list[TokenLogprobs] | None] = []
        """Of each chunk: the list that its sequence has at this time, for those of its tokens."""
        self.start_time = 0.0
        self.seconds_left = 0.0
        self.is_shared = False
        self.work: list[float] = []
        """Of a bounded step: 1, rows, prompt tokens, cached tokens that its rows read, the sum of cached
        tokens over the prompt tokens, and 1 if it has any. Cached tokens of a row count once."""
        self.defer_sampling = False
        self._slots: list[int] = []
        self._tokens: list[int] = []
        self._new_sequences: list[NewSequenceData] = []
        self._page_table_updates: list[PageTableUpdate] = []

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def has_chunk(self) -> bool:
        return len(self.sequences) > self.num_decodes

    def add_decodes(self, sequences: list[SequenceState]) -> None:
        """Add a row of one token per sequence; the token id is on the device.

        Called at most once, before ``add_chunk``. The longest sequences come first: attention starts
        its programs in the order of rows, and a long one that starts last would run alone.
        """
        self.sequences = sorted(sequences, key=_num_computed_tokens_of, reverse=True)
        self.num_decodes = len(sequences)
        self._slots = [s.slot for s in self.sequences]
        self.num_computed_tokens = [s.num_computed_tokens for s in self.sequences]
        self.num_scheduled_tokens = [1] * len(sequences)
        self.needs_sampling = [True] * len(sequences)
        self.defer_sampling = any(s.defer_sampling for s in sequences)
        for s in sequences:
            s.num_computed_tokens += 1
            s.num_tokens += 1

    def add_chunk(self, sequence: SequenceState, count: int) -> None:
        """Add the next ``count`` known tokens of a sequence; sample after the last one."""
        start = sequence.num_computed_tokens
        end = start + count
        samples = end == len(sequence.token_ids)
        self.sequences.append(sequence)
        self.needs_sampling.append(samples)
        self.prompt_logprobs.append(sequence.prompt_logprobs)
        self._slots.append(sequence.slot)
        self.num_computed_tokens.append(start)
        self.num_scheduled_tokens.append(count)
        self._tokens.extend(sequence.token_ids[start:end])
        sequence.num_computed_tokens = end
        if samples:
            sequence.num_tokens += 1
            sequence.last_on_device = True
            self.defer_sampling |= sequence.defer_sampling

    def add_new_sequence(self, sequence: SequenceState, tables: list[PageTableUpdate]) -> None:
        """Announce a sequence in a new slot. ``tables`` are the pages that it starts with."""
        self._new_sequences.append(
            NewSequenceData(
                slot=sequence.slot,
                params=sequence.params,
                num_prompt_tokens=sequence.num_prompt_tokens,
                token_ids=list(sequence.token_ids),
                seed=sequence.seed,
                stop_token_ids=sorted(sequence.stop_token_ids),
                bad_words=sequence.request.bad_words,
            )
        )
        self._page_table_updates.extend(tables)

    def add_page_table_update(self, updates: list[PageTableUpdate]) -> None:
        self._page_table_updates.extend(updates)

    def to_output(self, freed_slots: list[int]) -> SchedulerOutput:
        return SchedulerOutput(
            id=self.id,
            slots=self._slots,
            num_computed_tokens=self.num_computed_tokens,
            num_scheduled_tokens=self.num_scheduled_tokens,
            num_decodes=self.num_decodes,
            tokens=self._tokens,
            needs_sampling=self.needs_sampling,
            new_sequences=self._new_sequences,
            freed_slots=freed_slots,
            page_table_updates=self._page_table_updates,
            defer_sampling=self.defer_sampling,
        )
