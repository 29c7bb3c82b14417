"""Continuous batching: choose which tokens of which sequences the next step computes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from itertools import compress

from treadle.api.engine import SchedulingPolicy
from treadle.api.requests import TokenOutput
from treadle.api.step_types import ModelRunnerOutput, SchedulerOutput, TokenLogprobs
from treadle.cache import KVCacheManager
from treadle.config import SchedulerConfig
from treadle.errors import EngineDeadError
from treadle.scheduler.counters import SchedulerCounters
from treadle.scheduler.queue import WaitingQueue
from treadle.scheduler.sequence import SequenceState
from treadle.scheduler.step import InFlightStep
from treadle.scheduler.step_pace import StepPace
from treadle.structured_output.batch import GrammarBatch, GrammarRow
from treadle.structured_output.state import StructuredOutputState

__all__ = ("Scheduler",)

# Fraction of the pages that admission leaves free, for running sequences to grow before one is preempted.
WATERMARK = 0.01
NO_GRAMMARS = GrammarBatch([])


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
        cache: KVCacheManager,
        policy: SchedulingPolicy,
        eos_ids: Iterable[int],
        pace: StepPace | None = None,
    ) -> None:
        self.config = config
        self.cache = cache
        self.policy = policy
        self.eos_ids = frozenset(eos_ids)
        self.waiting = WaitingQueue()
        self.running: list[SequenceState] = []
        self.sequences: dict[str, SequenceState] = {}
        self.counters = SchedulerCounters()
        self.pace = pace or StepPace(0.0)
        self.pending_outputs: list[TokenOutput] = []
        """Outputs of ``schedule`` itself (errors). Its caller delivers and clears them."""
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._freed_slots: list[int] = []
        self._in_flight: deque[InFlightStep] = deque()
        self._next_id = 0
        self._grammars = NO_GRAMMARS
        self._reserve = int(WATERMARK * min(pool.capacity for pool in cache.pools))

    def add(self, sequence: SequenceState) -> None:
        sequence.sort_key = self.policy.sort_key(sequence)
        self.sequences[sequence.id] = sequence
        self.waiting.push(sequence)

    def abort(self, sequence_id: str) -> bool:
        """End a sequence. Return ``False`` if no live sequence has this id."""
        sequence = self.sequences.get(sequence_id)
        if sequence is None:
            return False
        self._finish(sequence, "abort")
        return True

    @property
    def has_work(self) -> bool:
        return bool(self.sequences)

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def _finish(self, sequence: SequenceState, reason: str) -> None:
        sequence.finished, self._grammars = True, NO_GRAMMARS
        del self.sequences[sequence.id]
        if sequence.is_running:
            self._free_slot(sequence)
        else:
            self.waiting.discard(sequence)
        self.cache.free(sequence)
        self.counters.finished[reason] += 1

    def _free_slot(self, sequence: SequenceState) -> None:
        self.running.remove(sequence)
        self._free_slots.append(sequence.slot)
        self._freed_slots.append(sequence.slot)
        sequence.slot = -1
        sequence.last_on_device = False

    def schedule(self) -> SchedulerOutput | None:
        """Return the next step, or ``None`` if nothing can run before a step in flight ends."""
        step = InFlightStep(self._next_id)
        self._schedule_rows(step)
        while not len(step) and self.running and not self._in_flight:
            # All pages are in use and no sequence can run: free the pages of one.
            if len(self.running) == 1:
                self.pending_outputs.append(self._error(self.running[0], NO_ROOM))
            else:
                self._preempt()
            self._schedule_rows(step)
        if not len(step):
            return None
        self._next_id += 1
        self._in_flight.append(step)
        freed_slots, self._freed_slots = self._freed_slots, []
        output = step.to_output(freed_slots)
        num_tokens = output.num_decodes + len(output.tokens)
        self.counters.step_tokens += num_tokens
        self.counters.steps_by_tokens[(num_tokens - 1).bit_length()] += 1
        return output

    def _schedule_rows(self, step: InFlightStep) -> None:
        budget = self.config.max_num_batched_tokens
        budget -= self._schedule_decodes(step)
        prompts = [s for s in self.running if not s.last_on_device]
        num_waiting = len(self.waiting) if self._free_slots else 0
        self.pace.start(step, is_shared=len(prompts) + num_waiting > 1)
        for sequence in prompts:
            if budget:
                budget -= self._schedule_prefill_chunk(step, sequence, budget)
        if budget:
            self._admit(step, budget)

    def _schedule_decodes(self, step: InFlightStep) -> int:
        """Schedule the next token of all sequences that generate; return their number.

        They are never more than a step may have tokens: one begins to generate with a chunk, which
        takes only what those before it have left.
        """
        page_size = self.cache.page_size
        while True:
            ready = [
                s for s in self.running if s.last_on_device and s.num_tokens < s.max_num_tokens
            ]
            # Tables have no spare page, so that a token needs one if those before it fill theirs.
            growing = [s for s in ready if s.num_computed_tokens % page_size == 0]
            if len(growing) <= self.cache.available:
                break
            self._preempt()
        if growing:
            step.add_page_table_update(self.cache.append_page(growing))
        if ready:
            step.add_decodes(ready)
        return len(ready)

    def _schedule_prefill_chunk(
        self, step: InFlightStep, sequence: SequenceState, budget: int
    ) -> int:
        """Schedule known tokens within ``budget``, time and available pages; return their number."""
        start = sequence.num_computed_tokens
        max_tokens = min(
            budget, self.config.chunked_prefill_size or budget, self.pace.max_tokens(step, start)
        )
        count = min(len(sequence.token_ids), self.cache.max_tokens_for(sequence)) - start
        count = min(count, max_tokens)
        if count <= 0:
            return 0
        step.add_page_table_update(self.cache.allocate_pages(sequence, start + count))
        step.add_chunk(sequence, count)
        self.pace.add_chunk(step, start, count)
        return count

    def _admit(self, step: InFlightStep, budget: int) -> None:
        skipped = []
        while (
            budget
            and self._free_slots
            and self.pace.max_tokens(step, 0)
            and (sequence := self.waiting.peek()) is not None
        ):
            if sequence.num_pending_tokens or self._waits_for_leader(sequence):
                skipped.append(self.waiting.pop())
                continue
            if not self._try_admit(sequence):
                break
            self.waiting.pop()
            sequence.slot = self._free_slots.pop()
            self.running.append(sequence)
            step.add_new_sequence(sequence, self.cache.page_table_updates(sequence))
            budget -= self._schedule_prefill_chunk(step, sequence, budget)
        for sequence in skipped:
            self.waiting.push(sequence)

    def _waits_for_leader(self, sequence: SequenceState) -> bool:
        """Return whether the prefix leader's prompt, which ``sequence`` shares, is incomplete."""
        leader = self.sequences.get(sequence.prefix_leader) if sequence.prefix_leader else None
        return leader is not None and leader.num_computed_tokens < leader.num_prompt_tokens

    def _try_admit(self, sequence: SequenceState) -> bool:
        """Start the page tables with cached pages; undo it if the other tokens do not fit now."""
        cache = self.cache
        leader = self.sequences.get(sequence.prefix_leader) if sequence.prefix_leader else None
        max_pages = (sequence.num_prompt_tokens - 1) // cache.page_size
        needs_full_prompt = sequence.prompt_logprobs is not None and not sequence.num_output_tokens
        if needs_full_prompt:
            hit = 0
        elif (
            leader is not None
            and leader.is_running
            and cache.share_tables(sequence, leader, max_pages)
        ):
            hit = max_pages
        else:
            hit = cache.find_cached_prefix(sequence, sequence.token_ids)
            cache.share_prefix(sequence, hit)
        length = len(sequence.token_ids)
        chunk = min(length, self.config.max_num_batched_tokens)
        reserve = self._reserve if self.running else 0
        stuck = cache.max_tokens_for(sequence) <= hit * cache.page_size
        if stuck or (self.running and not cache.can_allocate(sequence, length, chunk, reserve)):
            cache.free(sequence)
            return False
        sequence.num_computed_tokens = hit * cache.page_size
        if not sequence.num_output_tokens and not sequence.num_preemptions:
            sequence.num_cached_tokens = sequence.num_computed_tokens
            sequence.scheduled_time = time.monotonic()
            if sequence.prefix_leader is None:
                self.counters.prompt_tokens += sequence.num_prompt_tokens
            self.counters.prefix_cache_queries += sequence.num_prompt_tokens
            self.counters.prefix_cache_hits += sequence.num_computed_tokens
        return True

    def _preempt(self) -> None:
        """Free the pages of the policy's victim, which is recomputed when it is admitted again."""
        victim = self.running[self.policy.select_victim(tuple(self.running))]
        self._free_slot(victim)
        self.cache.free(victim)
        for step in self._in_flight:
            step.preempted.add(victim)
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        if victim.prompt_logprobs is not None and victim.num_tokens == victim.num_prompt_tokens:
            victim.prompt_logprobs = []  # the whole prompt is computed again
        self.waiting.push(victim)
        self.counters.num_preemptions += 1

    def update_from_output(self, result: ModelRunnerOutput) -> list[TokenOutput]:
        """Apply the model runner output of the oldest step in flight; return the new outputs.

        Raises ``EngineDeadError`` if it is of another step or has a wrong number of tokens.
        """
        step = self._in_flight.popleft()
        if step.id != result.id:
            raise EngineDeadError(
                f"the executor returned step {result.id}; expected step {step.id}"
            )
        if result.error is not None:
            return [self._error(s, result.error) for s in step.sequences if not s.finished]
        self.pace.learn(step)
        if len(result.sampled_token_ids) != sum(step.needs_sampling):
            raise EngineDeadError(
                f"the executor returned {len(result.sampled_token_ids)} tokens for step {step.id}; "
                f"expected {sum(step.needs_sampling)}"
            )
        errors = self._fail_invalid_rows(step, result) if result.invalid_rows else []
        if step.defer_sampling:
            self._advance_grammars(step, result)
        outputs = self._update_decodes(step, result)
        outputs += self._update_chunks(step, result)
        self.counters.generation_tokens += len(outputs)
        return errors + outputs

    def _fail_invalid_rows(
        self, step: InFlightStep, result: ModelRunnerOutput
    ) -> list[TokenOutput]:
        """End the sequences for which no token could be sampled."""
        invalid = set(result.invalid_rows)
        outputs = []
        for index, sequence in enumerate(compress(step.sequences, step.needs_sampling)):
            if index not in invalid or sequence.finished:
                continue
            error, param = result.row_errors.get(index), None
            if error is None:
                error, param = _grammar_error(sequence) or (NO_TOKEN, _impossible_param(sequence))
            outputs.append(self._error(sequence, error, param))
        return outputs

    def _advance_grammars(self, step: InFlightStep, result: ModelRunnerOutput) -> None:
        """Let the grammars read the sampled tokens, all at once, before the sequences gain them."""
        batch, tokens = self._grammars, result.sampled_token_ids
        if self._has_grammars(step) and batch.stop_ids.isdisjoint(tokens):
            tokens = [tokens[row] for row, *_ in batch.rows]
        else:
            rows: list[GrammarRow] = []
            sampled = zip(compress(step.sequences, step.needs_sampling), tokens, strict=True)
            tokens = []
            for s, token in sampled:
                is_end = token in s.stop_token_ids and s.num_output_tokens >= s.params.min_tokens
                if s.grammar_state is not None and not s.finished and not is_end:
                    rows.append((len(rows), s.grammar_state, (), ()))
                    tokens.append(token)
            batch = GrammarBatch(rows)
        batch.accept_tokens(tokens)

    def _update_decodes(self, step: InFlightStep, result: ModelRunnerOutput) -> list[TokenOutput]:
        """Append the tokens of the rows that generate, none of which is its sequence's first.

        All sequences pass through this loop in each step, so that it does for most of them only
        what each token needs.
        """
        page_size, logprobs = self.cache.page_size, result.logprobs
        may_jump = not self._in_flight
        decodes = zip(step.sequences[: step.num_decodes], result.sampled_token_ids, strict=False)
        outputs = []
        for row, (sequence, token) in enumerate(decodes):
            if sequence.finished:
                continue
            token_ids = sequence.token_ids
            computed = len(token_ids)
            token_ids.append(token)
            if computed % page_size == 0 and sequence not in step.preempted:
                self.cache.cache_full_pages(sequence, token_ids, computed)
            if (
                token in sequence.stop_token_ids
                or computed + 1 >= sequence.max_num_tokens
                or (
                    sequence.grammar_state is not None
                    and (may_jump or sequence.grammar_state.has_ended)
                )
                or row in logprobs
            ):
                outputs.append(self._advance(sequence, token, logprobs.get(row)))
            else:
                outputs.append(TokenOutput(sequence.id, [token]))
        return outputs

    def _update_chunks(self, step: InFlightStep, result: ModelRunnerOutput) -> list[TokenOutput]:
        """Cache what the rows of known tokens computed, and append the tokens they sampled."""
        sampled = iter(result.sampled_token_ids[step.num_decodes :])
        outputs = []
        for row in range(step.num_decodes, len(step)):
            sequence = step.sequences[row]
            token = next(sampled) if step.needs_sampling[row] else None
            if sequence.finished:
                continue
            if token is not None:
                sequence.token_ids.append(token)
            if sequence not in step.preempted:
                computed = step.num_computed_tokens[row] + step.num_scheduled_tokens[row]
                self.cache.cache_full_pages(sequence, sequence.token_ids, computed)
            prompt_logprobs = step.prompt_logprobs[row - step.num_decodes]
            if prompt_logprobs is not None:
                prompt_logprobs.extend(result.prompt_logprobs.get(row, ()))
            if token is not None:
                outputs.append(self._advance(sequence, token, result.logprobs.get(row)))
        return outputs

    def _advance(
        self, sequence: SequenceState, token: int, logprobs: TokenLogprobs | None
    ) -> TokenOutput:
        first, state = sequence.num_output_tokens == 1, sequence.grammar_state
        tokens, (reason, stop) = [token], self._stops(sequence, token)
        if reason is None and state is not None and sequence.may_jump and not self._in_flight:
            tokens += self._jump(sequence, state)
            reason, stop = self._stops(sequence, tokens[-1])
        if (error := _grammar_error(sequence)) is not None:
            return self._error(sequence, *error)
        output = TokenOutput(
            id=sequence.id,
            token_ids=tokens,
            finish_reason=reason,
            stop_reason=stop,
            cached_tokens=sequence.num_cached_tokens if first else 0,
            scheduled_time=sequence.scheduled_time if first else None,
            logprobs=None if logprobs is None else [logprobs],
            prompt_logprobs=sequence.prompt_logprobs if first else None,
            unenforced=state.unenforced if first and state is not None else None,
        )
        if reason is not None:
            self._finish(sequence, reason)
        return output

    def _jump(self, sequence: SequenceState, state: StructuredOutputState) -> list[int]:
        """Append the tokens that the grammar forces, and return them. They are computed as a prompt is."""
        forced = state.forced_tokens()[: sequence.max_num_tokens - len(sequence.token_ids)]
        if not forced or not sequence.stop_token_ids.isdisjoint(forced):
            return []
        if not all(0 <= token < sequence.vocab_size for token in forced):
            state.fail(ValueError(f"it forces ids that are no tokens: {forced!r:.99}"))
            return []
        for token in forced:
            state.accept_token(token)
        sequence.token_ids += forced
        sequence.num_tokens, sequence.last_on_device = len(sequence.token_ids), False
        self.counters.generation_tokens += len(forced)
        return forced

    def grammars(self) -> GrammarBatch:
        """Return the constrained rows of the newest step, which mostly are those of the step before."""
        step = self._in_flight[-1]
        if not self._has_grammars(step):
            rows: list[GrammarRow] = [
                (row, s.grammar_state, s.stop_token_ids, s.forbidden_ids())
                for row, s in enumerate(step.sequences)
                if s.grammar_state is not None and step.needs_sampling[row] and not s.finished
            ]
            is_fixed = not (step.has_chunk or any(s.request.bad_words for s in step.sequences))
            self._grammars = GrammarBatch(rows, step.sequences if is_fixed else ())
        return self._grammars

    def _has_grammars(self, step: InFlightStep) -> bool:
        return not step.has_chunk and self._grammars.sequences == step.sequences

    def _stops(self, sequence: SequenceState, token: int) -> tuple[str | None, int | None]:
        if (
            token in sequence.stop_token_ids
            and sequence.num_output_tokens > sequence.params.min_tokens
        ):
            eos = token in self.eos_ids and not sequence.params.ignore_eos
            return "stop", None if eos else token
        if sequence.grammar_state is not None and sequence.grammar_state.has_ended:
            return "stop", None
        if len(sequence.token_ids) >= sequence.max_num_tokens:
            return "length", None
        return None, None

    def _error(
        self, sequence: SequenceState, message: str, param: str | None = None
    ) -> TokenOutput:
        self._finish(sequence, "error")
        return TokenOutput(sequence.id, [], "error", error=message, param=param)

    def check_integrity(self) -> list[str]:
        """Return the violated invariants of pages, slots and queue. O(pages)."""
        faults = self.cache.check_integrity(self.sequences.values())
        slots = [s.slot for s in self.running]
        if sorted(slots + self._free_slots) != list(range(self.config.max_num_seqs)):
            faults.append("a slot is lost or in use twice")
        for sequence in self.sequences.values():
            if not sequence.is_running and any(sequence.page_tables):
                faults.append(f"{sequence!r} is waiting, but has pages")
            pages = self.cache.num_pages_for(sequence.num_computed_tokens)
            if sequence.is_running and len(sequence.page_tables[0]) != pages:
                faults.append(f"{sequence!r} has more or fewer pages than its tokens fill")
            if sequence.last_on_device and sequence.num_tokens != sequence.num_computed_tokens + 1:
                faults.append(f"{sequence!r} generates, but its last token is not the next one")
        if len(self.sequences) != len(self.running) + len(self.waiting):
            faults.append("a live sequence is neither running nor waiting")
        return faults


def _grammar_error(sequence: SequenceState) -> tuple[str, str | None] | None:
    """Return why the grammar has ended a sequence, and the parameter at fault, if one is."""
    state = sequence.grammar_state
    return None if state is None or state.error is None else (state.error, state.error_param)


def _impossible_param(sequence: SequenceState) -> str | None:
    """Return the parameter that leaves no token, ``None`` if the logits must be wrong."""
    allowed = sequence.params.allowed_token_ids
    is_empty = allowed is not None and set(allowed) <= set(sequence.forbidden_ids())
    return "allowed_token_ids" if is_empty else None


NO_ROOM = "the KV cache is too small for this sequence, even alone; raise num_pages"
NO_TOKEN = (
    "no token can be sampled for this sequence: its logits are NaN or all masked; "
    "check allowed_token_ids, bad_words and logit_bias, or the checkpoint"
)
