"""A step while it is being scheduled and in flight."""

from __future__ import annotations

from operator import attrgetter

from treadle.api.step_types import PageWrite, SlotStart, StepPlan
from treadle.scheduler.sequence import Sequence

__all__ = ("PlannedStep",)

_computed = attrgetter("computed")


class PlannedStep:
    """Rows of a step in the order of ``SchedulerOutput``: decodes first, then prefill chunks."""

    def __init__(self, step_id: int) -> None:
        self.id = step_id
        self.sequences: list[Sequence] = []
        self.epochs: list[int] = []
        self.ends: list[int] = []
        self.counts: list[int] = []
        self.samples: list[bool] = []
        self._slots: list[int] = []
        self._starts: list[int] = []
        self._decodes = 0
        self._tokens: list[int] = []
        self._opened: list[SlotStart] = []
        self._page_writes: list[PageWrite] = []

    def __len__(self) -> int:
        return len(self.sequences)

    def decode(self, sequences: list[Sequence]) -> None:
        """Add a row of one token per sequence; the token id is on the device.

        Called at most once, before ``chunk``. The longest sequences come first: attention starts
        its programs in the order of rows, and a long one that starts last would run alone.
        """
        self.sequences = sorted(sequences, key=_computed, reverse=True)
        self._decodes = len(sequences)
        self._slots = [s.slot for s in self.sequences]
        self._starts = [s.computed for s in self.sequences]
        self.counts = [1] * len(sequences)
        self.samples = [True] * len(sequences)
        self.epochs = [s.epoch for s in self.sequences]
        for s in sequences:
            s.computed += 1
            s.pending += 1
        self.ends = [s.computed for s in self.sequences]

    def chunk(self, sequence: Sequence, count: int) -> None:
        """Add the next ``count`` known tokens of a sequence; sample after the last one."""
        start = sequence.computed
        end = start + count
        samples = end == len(sequence.tokens)
        self.sequences.append(sequence)
        self.epochs.append(sequence.epoch)
        self.ends.append(end)
        self.samples.append(samples)
        self._slots.append(sequence.slot)
        self._starts.append(start)
        self.counts.append(count)
        self._tokens.extend(sequence.tokens[start:end])
        sequence.computed = end
        if samples:
            sequence.pending += 1
            sequence.last_on_device = True

    def open(self, sequence: Sequence, tables: list[PageWrite]) -> None:
        """Announce a sequence in a new slot. ``tables`` are the pages that it starts with."""
        self._opened.append(
            SlotStart(
                slot=sequence.slot,
                params=sequence.params,
                prompt_len=sequence.prompt_len,
                tokens=list(sequence.tokens),
                seed=sequence.seed,
                stop_ids=sorted(sequence.stop_ids),
                bad_words=sequence.request.bad_words,
            )
        )
        self._page_writes.extend(tables)

    def write_pages(self, writes: list[PageWrite]) -> None:
        self._page_writes.extend(writes)

    def finish(self, closed: list[int]) -> StepPlan:
        return StepPlan(
            id=self.id,
            slots=self._slots,
            starts=self._starts,
            counts=self.counts,
            decodes=self._decodes,
            tokens=self._tokens,
            samples=self.samples,
            opened=self._opened,
            closed=closed,
            page_writes=self._page_writes,
            held=any(s.held and x for s, x in zip(self.sequences, self.samples, strict=True)),
        )
