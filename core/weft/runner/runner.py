"""Runs steps of one model on one device."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor
from tqdm import tqdm

from weft.api.models import Collective
from weft.config import EngineConfig
from weft.engine.plan import EngineFacts, StepPlan, StepResult
from weft.plugins import Host
from weft.runner.graphs import DecodeGraphs, bucket_sizes
from weft.runner.inputs import Packer, PageTables, build_inputs
from weft.runner.outputs import PendingStep
from weft.runner.start import Started, start_model
from weft.sampling.logprobs import prompt_logprobs
from weft.sampling.sampler import Sampler

__all__ = ("ModelRunner",)


class ModelRunner:
    """One rank's model, page tables and sampler. Used from one thread.

    ``launch`` enqueues a step and returns; ``collect`` waits for the oldest. On CUDA neither waits
    for the device, but for the step that ``collect`` returns.
    """

    def __init__(self, config: EngineConfig, host: Host, ranks: Collective | None = None) -> None:
        """Build and load the model, allocate its pages, capture graphs; see ``Executor.start``."""
        self._started: Started = start_model(config, host, ranks)
        self.model = self._started.model
        self.device = self._started.device
        self.facts: EngineFacts = self._started.facts
        slots = config.scheduler.max_num_seqs + 1  # the last one is for padding rows
        columns = -(-self.facts.max_model_len // self.facts.page_size)
        self._packer = Packer(self.device)
        groups = len(self.facts.groups)
        self._tables = PageTables(groups, slots, columns, self._packer, self.device)
        self._last_tokens = torch.zeros(slots, dtype=torch.int64, device=self.device)
        self._sampler = Sampler(slots, self.facts.vocab_size, self.device)
        self._prompts: dict[int, tuple[list[int], int]] = {}
        self._pending: deque[PendingStep] = deque()
        self._graphs: DecodeGraphs | None = None
        if self.device.type == "cuda" and not config.device.enforce_eager:
            self._capture(config.scheduler.max_num_seqs)

    @torch.inference_mode()
    def _capture(self, max_rows: int) -> None:
        attention = self._started.attention
        if not attention.graph_safe:
            self.facts.report.append(f"graphs       none: attention {attention.names} is not graph-safe")
            return
        before = torch.cuda.mem_get_info(self.device)[0]
        self._graphs = DecodeGraphs(
            self.model,
            attention,
            self._tables,
            self._sampler,
            self._last_tokens,
            self._packer,
            self.facts.page_size,
            self.facts.max_model_len,
        )

        def progress(sizes: Sequence[int]) -> tqdm[int]:
            return tqdm(sizes, desc="Capturing CUDA graphs", unit="size", leave=False)

        sizes = bucket_sizes(max_rows)
        self._graphs.capture(sizes, progress)
        used = before - torch.cuda.mem_get_info(self.device)[0]
        self.facts.report.append(f"graphs       {used / (1 << 30):8.3f} GiB: {len(sizes)} batch sizes")

    # ------------------------------------------------------------------------------- steps

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        self._change_slots(plan)
        pending = PendingStep(plan.id, self.device)
        captured = None
        if self._graphs is not None and plan.decodes == len(plan.slots):
            captured = self._graphs.find(plan.decodes)
        if self._graphs is not None and captured is not None:
            logits = self._graphs.forward(captured, plan.slots, plan.starts)
            features = self._sampler.features(plan.slots)
            rows = list(range(plan.decodes))
            if features is not None:
                pending.sampled(rows, *self._graphs.sample(captured, plan.decodes, features))
            else:
                slots, at = captured.inputs[0, : len(rows)], captured.inputs[1, : len(rows)] + 1
                self._sample(pending, rows, logits, slots, at, plan.slots)
        else:
            self._launch_eager(plan, pending)
        pending.record()
        self._pending.append(pending)

    def _launch_eager(self, plan: StepPlan, pending: PendingStep) -> None:
        inputs = build_inputs(
            plan, self._tables, self._last_tokens, self.facts.page_size, self._packer
        )
        step = self._started.attention.plan(inputs.batches)
        hidden = self.model.forward(inputs.input_ids, inputs.positions, step)
        self._prompt_logprobs(plan, hidden, pending)
        if not inputs.sampled:
            return
        if inputs.sample_tokens is not None:
            hidden = hidden.index_select(0, inputs.sample_tokens)
        logits = self.model.logits(hidden)
        rows = [row for row, samples in enumerate(plan.samples) if samples]
        self._sample(
            pending, rows, logits, inputs.sample_slots, inputs.sample_positions, inputs.sampled
        )

    def _sample(
        self,
        pending: PendingStep,
        rows: list[int],
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        host_slots: list[int],
    ) -> None:
        output = self._sampler.sample(logits, slots, positions, host_slots)
        self._last_tokens.index_copy_(0, slots, output.tokens)
        pending.sampled(rows, output.tokens, output.bad, output.logprobs)

    def _change_slots(self, plan: StepPlan) -> None:
        if plan.closed:
            self._sampler.close(plan.closed)
            for slot in plan.closed:
                self._prompts.pop(slot, None)
        if plan.opened:
            self._sampler.open(plan.opened)
            for start in plan.opened:
                top = start.params.prompt_logprobs
                if top is not None and len(start.tokens) == start.prompt_len:
                    self._prompts[start.slot] = (start.tokens, top)
        if plan.page_writes:
            self._tables.write(plan.page_writes)

    def _prompt_logprobs(self, plan: StepPlan, hidden: Tensor, pending: PendingStep) -> None:
        """Logprobs of prompt tokens whose predecessors this step computes, for rows that asked."""
        if not self._prompts:
            return
        first = 0
        rows = zip(plan.slots, plan.starts, plan.counts, strict=True)
        for row, (slot, start, count) in enumerate(rows):
            if slot in self._prompts:
                prompt, top = self._prompts[slot]
                last = min(start + count, len(prompt) - 1)
                if last > start:
                    targets = torch.tensor(prompt[start + 1 : last + 1], device=self.device)
                    logits = self.model.logits(hidden[first : first + last - start])
                    pending.prompt(row, prompt_logprobs(logits, targets, top))
            first += count

    def collect(self) -> StepResult:
        """Wait for the oldest launched step."""
        return self._pending.popleft().result()
