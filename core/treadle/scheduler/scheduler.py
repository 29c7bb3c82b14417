"""Continuous batching: choose which tokens of which sequences the next step computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from treadle.api.engine import SchedulingPolicy
from treadle.api.requests import TokenOutput
from treadle.api.step_types import StepPlan, StepResult, TokenLogprobs
from treadle.cache import KVCache
from treadle.config import SchedulerConfig
from treadle.errors import EngineDeadError
from treadle.scheduler.counters import Counters
from treadle.scheduler.queue import WaitingQueue
from treadle.scheduler.sequence import Sequence
from treadle.scheduler.step import PlannedStep
from treadle.structured_output import Guide

__all__ = ("Scheduler",)

# Fraction of the pages that admission leaves free, so that running sequences can grow for a while
# before one of them must be preempted.
WATERMARK = 0.01


class Scheduler:
    """The owner of all live sequences, slots and page tables. Not thread-safe.

    ``schedule`` may run while earlier steps are in flight: it needs lengths and pages, not the
    values of sampled tokens. ``update_from_output`` takes the outputs in the order of the steps.
    Pages of a finished sequence are reused at once, even if a step in flight still reads them:
    the device runs steps in order, so that step ends before a later one writes to the pages.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: KVCache,
        policy: SchedulingPolicy,
        eos_ids: Iterable[int],
    ) -> None:
        self.config = config
        self.cache = cache
        self.policy = policy
        self.eos_ids = frozenset(eos_ids)
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self.live: dict[str, Sequence] = {}
        self.counters = Counters()
        self.outbox: list[TokenOutput] = []
        """Outputs of ``schedule`` itself (errors). Its caller delivers and clears them."""
        self._slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._closed: list[int] = []
        self._in_flight: deque[PlannedStep] = deque()
        self._next_id = 0
        self._reserve = int(WATERMARK * min(pool.capacity for pool in cache.pools))

    # ----------------------------------------------------------------------- arrivals, ends

    def add(self, sequence: Sequence) -> None:
        sequence.order = self.policy.order(sequence)
        self.live[sequence.id] = sequence
        self.waiting.push(sequence)

    def abort(self, sequence_id: str) -> bool:
        """End a sequence. Return ``False`` if no live sequence has this id."""
        sequence = self.live.get(sequence_id)
        if sequence is None:
            return False
        self._end(sequence, "abort")
        return True

    @property
    def has_work(self) -> bool:
        return bool(self.live)

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def _end(self, sequence: Sequence, reason: str) -> None:
        sequence.finished = True
        del self.live[sequence.id]
        if sequence.running:
            self._leave_slot(sequence)
        else:
            self.waiting.forget(sequence)
        self.cache.release(sequence)
        self.counters.finished[reason] = self.counters.finished.get(reason, 0) + 1

    def _leave_slot(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._slots.append(sequence.slot)
        self._closed.append(sequence.slot)
        sequence.slot = -1
        sequence.last_on_device = False

    # ----------------------------------------------------------------------------- planning

    def plan(self) -> StepPlan | None:
        """Return the next step, or ``None`` if nothing can run before a step in flight ends."""
        step = PlannedStep(self._next_id)
        self._fill(step)
        while not len(step) and self.running and not self._in_flight:
            # All pages are in use and no sequence can run: free the pages of one.
            if len(self.running) == 1:
                self.outbox.append(self._error(self.running[0], NO_ROOM))
            else:
                self._preempt()
            self._fill(step)
        if not len(step):
            return None
        self._next_id += 1
        self._in_flight.append(step)
        closed, self._closed = self._closed, []
        return step.finish(closed)

    def _fill(self, step: PlannedStep) -> None:
        budget = self.config.max_num_batched_tokens
        budget -= self._plan_decodes(step, budget)
        for sequence in self.running:
            if budget and not sequence.last_on_device:
                budget -= self._plan_chunk(step, sequence, budget)
        if budget:
            self._admit(step, budget)

    def _plan_decodes(self, step: PlannedStep, budget: int) -> int:
        while True:
            ready = [
                s
                for s in self.running
                if s.last_on_device and s.total - s.computed == 1 and s.total < s.max_len
            ][:budget]
            size = self.cache.page_size
            growing = [s for s in ready if s.computed >= len(s.tables[0]) * size]
            if len(growing) <= self.cache.available:
                break
            self._preempt()
        for sequence in growing:
            step.write_pages(self.cache.grow(sequence, sequence.computed + 1))
        if ready:
            step.decode(ready)
        return len(ready)

    def _plan_chunk(self, step: PlannedStep, sequence: Sequence, budget: int) -> int:
        """Schedule known tokens within ``budget`` and the available pages; return their number."""
        most = min(budget, self.config.prefill_chunk or budget)
        count = min(len(sequence.tokens), self.cache.room(sequence)) - sequence.computed
        count = min(count, most)
        if count <= 0:
            return 0
        step.write_pages(self.cache.grow(sequence, sequence.computed + count))
        step.chunk(sequence, count)
        self.counters.prompt_tokens += count
        return count

    def _admit(self, step: PlannedStep, budget: int) -> None:
        held = []
        while budget and self._slots and (sequence := self.waiting.peek()) is not None:
            if sequence.pending or self._follows(sequence):
                held.append(self.waiting.pop())
                continue
            if not self._share_and_check(sequence):
                break
            self.waiting.pop()
            sequence.slot = self._slots.pop()
            self.running.append(sequence)
            step.open(sequence, self.cache.written(sequence))
            budget -= self._plan_chunk(step, sequence, budget)
        for sequence in held:
            self.waiting.push(sequence)

    def _follows(self, sequence: Sequence) -> bool:
        """Return whether the prefix leader's prompt, which ``sequence`` shares, is incomplete."""
        leader = self.live.get(sequence.leader) if sequence.leader else None
        return leader is not None and leader.computed < leader.prompt_len

    def _share_and_check(self, sequence: Sequence) -> bool:
        """Start the page tables with cached pages; undo it if the other tokens do not fit now."""
        cache = self.cache
        leader = self.live.get(sequence.leader) if sequence.leader else None
        most = (sequence.prompt_len - 1) // cache.page_size
        whole = sequence.prompt_logprobs is not None and not sequence.output_len
        if whole:
            hit = 0
        elif leader is not None and leader.running and cache.share_tables(sequence, leader, most):
            hit = most
        else:
            hit = cache.match(sequence, sequence.tokens)
            cache.share_prefix(sequence, hit)
        length = len(sequence.tokens)
        chunk = min(length, self.config.max_num_batched_tokens)
        reserve = self._reserve if self.running else 0
        stuck = cache.room(sequence) <= hit * cache.page_size
        if stuck or (self.running and not cache.fits(sequence, length, chunk, reserve)):
            cache.release(sequence)
            return False
        sequence.computed = hit * cache.page_size
        if not sequence.output_len and not sequence.epoch:
            sequence.cached_tokens = sequence.computed
            self.counters.prefix_queries += sequence.prompt_len
            self.counters.prefix_hits += sequence.computed
        return True

    def _preempt(self) -> None:
        """Free the pages of the policy's victim, which is recomputed when it is admitted again."""
        victim = self.running[self.policy.victim(tuple(self.running))]
        self._leave_slot(victim)
        self.cache.release(victim)
        victim.computed = 0
        victim.epoch += 1
        if victim.prompt_logprobs is not None and not victim.output_len:
            victim.prompt_logprobs = []
        self.waiting.push(victim)
        self.counters.preemptions += 1

    # --------------------------------------------------------------------------- collecting

    def commit(self, result: StepResult) -> list[TokenOutput]:
        """Apply the model runner output of the oldest step in flight; return the new outputs.

        Raises ``EngineDeadError`` if it is of another step or has a wrong number of tokens.
        """
        step = self._in_flight.popleft()
        if step.id != result.id:
            raise EngineDeadError(
                f"the executor returned step {result.id}; expected step {step.id}"
            )
        if result.error is not None:
            return self._fail(step, result.error)
        if len(result.tokens) != sum(step.samples):
            raise EngineDeadError(
                f"the executor returned {len(result.tokens)} tokens for step {step.id}; "
                f"expected {sum(step.samples)}"
            )
        outputs = []
        sampled = iter(result.tokens)
        bad = set(result.bad)
        index = -1
        size = self.cache.page_size
        for row, sequence in enumerate(step.sequences):
            token = None
            if step.samples[row]:
                token = next(sampled)
                index += 1
            if sequence.finished:
                continue
            end = step.ends[row]
            current = step.epochs[row] == sequence.epoch
            if token is not None:
                sequence.pending -= 1
                if index in bad:
                    outputs.append(
                        self._error(
                            sequence, result.faults.get(index) or _guide_error(sequence) or NO_TOKEN
                        )
                    )
                    continue
                sequence.tokens.append(token)
            if current and (end % size == 0 or step.counts[row] > 1):  # a page may be full now
                self.cache.keep(sequence, sequence.tokens, end)
            if row in result.prompt_logprobs and current and sequence.prompt_logprobs is not None:
                sequence.prompt_logprobs.extend(result.prompt_logprobs[row])
            if token is not None:
                outputs.append(self._advance(sequence, token, result.logprobs.get(row)))
        return outputs

    def _advance(
        self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None
    ) -> TokenOutput:
        self.counters.generated_tokens += 1
        reason, stop = self._stops(sequence, token)
        if (error := _guide_error(sequence)) is not None:
            return self._error(sequence, error)
        first = sequence.output_len == 1
        output = TokenOutput(
            id=sequence.id,
            tokens=[token],
            finish_reason=reason,
            stop_reason=stop,
            cached_tokens=sequence.cached_tokens if first else 0,
            logprobs=None if logprobs is None else [logprobs],
            prompt_logprobs=sequence.prompt_logprobs if first else None,
        )
        if reason is not None:
            self._end(sequence, reason)
        return output

    def guided_rows(self) -> list[tuple[int, Guide, frozenset[int]]]:
        """Return row, grammar state and stop ids of each constrained row of the newest step."""
        step = self._in_flight[-1]
        return [
            (row, s.guide, s.stop_ids)
            for row, s in enumerate(step.sequences)
            if s.guide is not None and step.samples[row] and not s.finished
        ]

    def _stops(self, sequence: Sequence, token: int) -> tuple[str | None, int | None]:
        if token in sequence.stop_ids and sequence.output_len > sequence.params.min_tokens:
            eos = token in self.eos_ids and not sequence.params.ignore_eos
            return "stop", None if eos else token
        if sequence.guide is not None and sequence.guide.advance(token):
            return "stop", None
        if len(sequence.tokens) >= sequence.max_len:
            return "length", None
        return None, None

    def _error(self, sequence: Sequence, message: str) -> TokenOutput:
        self._end(sequence, "error")
        return TokenOutput(id=sequence.id, tokens=[], finish_reason="error", error=message)

    def _fail(self, step: PlannedStep, message: str) -> list[TokenOutput]:
        """End every sequence of a failed step with the error ``message``."""
        return [self._error(s, message) for s in step.sequences if not s.finished]

    # ------------------------------------------------------------------------------ checking

    def check_integrity(self) -> list[str]:
        """Return the violated invariants of pages, slots and queue. O(pages)."""
        faults = self.cache.faults(self.live.values())
        slots = [s.slot for s in self.running]
        if sorted(slots + self._slots) != list(range(self.config.max_num_seqs)):
            faults.append("a slot is lost or in use twice")
        for sequence in self.live.values():
            if not sequence.running and any(sequence.tables):
                faults.append(f"{sequence!r} is waiting, but has pages")
            if (
                sequence.running
                and sequence.computed > len(sequence.tables[0]) * self.cache.page_size
            ):
                faults.append(f"{sequence!r} has fewer pages than tokens")
        if len(self.live) != len(self.running) + len(self.waiting):
            faults.append("a live sequence is neither running nor waiting")
        return faults


def _guide_error(sequence: Sequence) -> str | None:
    return None if sequence.guide is None else sequence.guide.error


NO_ROOM = "the KV cache is too small for this sequence, even alone; raise num_pages"
NO_TOKEN = (
    "no token can be sampled for this sequence: its logits are NaN or all masked; "
    "check allowed_token_ids, bad_words and logit_bias, or the checkpoint"
)
