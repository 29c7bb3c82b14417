"""Runs steps of one model on one device."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from weft.api.models import CausalModel, Collective
from weft.config import EngineConfig
from weft.engine.plan import EngineFacts, StepPlan, StepResult, TokenLogprobs
from weft.plugins import Host
from weft.runner.inputs import Packer, PageTables, StepInputs, build_inputs
from weft.runner.outputs import PendingStep
from weft.runner.start import Started, start_model
from weft.sampling.logprobs import prompt_logprobs
from weft.sampling.sampler import Sampler

__all__ = ("ModelRunner",)


class ModelRunner:
    """One rank's model, page tables and sampler. Used from one thread.

    ``launch`` enqueues a step and returns; ``collect`` waits for the oldest. Results of a step
    reach the host through pinned memory, so that on CUDA neither call waits for the device except
    ``collect`` for the step that it returns.
    """

    def __init__(self, config: EngineConfig, host: Host, ranks: Collective | None = None) -> None:
        self.config = config
        self._host = host
        self._ranks = ranks
        self._pending: deque[PendingStep] = deque()

    def start(self) -> EngineFacts:
        """Build and load the model, allocate pages; see ``Executor.start``."""
        self._started: Started = start_model(self.config, self._host, self._ranks)
        started = self._started
        self.model: CausalModel = started.model
        self.device = started.device
        slots = self.config.scheduler.max_num_seqs + 1
        columns = -(-started.facts.max_model_len // started.facts.page_size)
        self._packer = Packer(self.device)
        self._tables = PageTables(
            len(started.facts.groups), slots, columns, self._packer, self.device
        )
        self._last_tokens = torch.zeros(slots, dtype=torch.int64, device=self.device)
        self._sampler = Sampler(slots, started.facts.vocab_size, self.device)
        self._prompts: dict[int, tuple[list[int], int, int]] = {}
        return started.facts

    # ------------------------------------------------------------------------------- steps

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        self._change_slots(plan)
        inputs = build_inputs(
            plan, self._tables, self._last_tokens, self._started.facts.page_size, self._packer
        )
        step = self._started.attention.plan(inputs.batches)
        hidden = self.model.forward(inputs.input_ids, inputs.positions, step)
        pending = PendingStep(plan.id, self.device)
        self._prompt_logprobs(plan, hidden, pending)
        if inputs.sampled:
            self._sample(plan, inputs, hidden, pending)
        pending.record()
        self._pending.append(pending)

    def _change_slots(self, plan: StepPlan) -> None:
        if plan.closed:
            self._sampler.close(plan.closed)
            for slot in plan.closed:
                self._prompts.pop(slot, None)
        if plan.opened:
            self._sampler.open(plan.opened)
            for start in plan.opened:
                if start.params.prompt_logprobs is not None and len(start.tokens) == start.prompt_len:
                    self._prompts[start.slot] = (
                        start.tokens, start.prompt_len, start.params.prompt_logprobs
                    )
        if plan.page_writes:
            self._tables.write(plan.page_writes)

    def _sample(
        self, plan: StepPlan, inputs: StepInputs, hidden: Tensor, pending: PendingStep
    ) -> None:
        if inputs.sample_tokens is not None:
            hidden = hidden.index_select(0, inputs.sample_tokens)
        logits = self.model.logits(hidden)
        output = self._sampler.sample(
            logits, inputs.sample_slots, inputs.sample_positions, inputs.sampled
        )
        self._last_tokens.index_copy_(0, inputs.sample_slots, output.tokens)
        rows = [row for row, samples in enumerate(plan.samples) if samples]
        pending.sampled(output, rows)

    def _prompt_logprobs(self, plan: StepPlan, hidden: Tensor, pending: PendingStep) -> None:
        """Logprobs of prompt tokens whose predecessors this step computes, for rows that asked."""
        if not self._prompts:
            return
        first = 0
        for row, (slot, start, count) in enumerate(
            zip(plan.slots, plan.starts, plan.counts, strict=True)
        ):
            if slot in self._prompts:
                tokens, prompt_len, top = self._prompts[slot]
                last = min(start + count, prompt_len - 1)
                if last > start:
                    targets = torch.tensor(tokens[start + 1 : last + 1], device=self.device)
                    logits = self.model.logits(hidden[first : first + last - start])
                    pending.prompt(row, prompt_logprobs(logits, targets, top))
            first += count

    def collect(self) -> StepResult:
        return self._pending.popleft().result()

    @property
    def in_flight(self) -> int:
        return len(self._pending)

    def drop(self) -> None:
        """Forget steps that were launched and will not be collected (a step has failed)."""
        self._pending.clear()


LogprobRows = dict[int, list[TokenLogprobs]]
