"""The model runner: runs the steps of a model on one device."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from treadle.api.attention import Step
from treadle.api.communicators import Communicator
from treadle.api.engine import LogitsProcessor
from treadle.api.kinds import LOGITS_PROCESSORS
from treadle.api.step_types import EngineFacts, StepEdits, StepPlan, StepResult
from treadle.config import EngineConfig
from treadle.errors import PluginLoadError
from treadle.plugins import PluginManager
from treadle.runner.cuda_graphs import DecodeGraphs, bucket_sizes
from treadle.runner.device import describe
from treadle.runner.inputs import Packer, PageTables, build_inputs
from treadle.runner.load import Started, start_model
from treadle.runner.memory import GIB, explained
from treadle.runner.outputs import PendingStep, marked
from treadle.runner.report import option_line, stage_line
from treadle.sampling.kernels import install_sampler_kernels
from treadle.sampling.logprobs import prompt_logprobs
from treadle.sampling.sampler import Sampler

__all__ = ("ModelRunner",)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SampleRows:
    """The rows of a step that need sampling, with their logits."""

    rows: list[int]
    """Indices in the scheduler output."""
    host_slots: list[int]
    logits: Tensor  # [sampled, vocab]
    slots: Tensor  # int64 [sampled]
    positions: Tensor  # int64 [sampled], index of the new token in its sequence
    raw: Tensor | None = None
    """The model's logits, if logits processors have edited ``logits``; else ``None``."""


class ModelRunner:
    """Model, page tables and sampler of a rank. Use it from one thread.

    On CUDA, ``execute_model`` and ``sample_tokens`` do not wait for the device. ``get_output``
    waits for the oldest step only.
    """

    def __init__(
        self, config: EngineConfig, host: PluginManager, ranks: Communicator | None = None
    ) -> None:
        """Build and load the model, allocate the KV cache, capture CUDA graphs."""
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
        kernels = install_sampler_kernels(
            self._sampler, host, describe(self.device), self.facts.dtype
        )
        if kernels:
            self.facts.report.append(
                "sampler      " + ", ".join(f"{op}: {name}" for op, name in kernels.items())
            )
        self._prompts: dict[int, tuple[list[int], int]] = {}
        names = config.plugins.logits_processors
        made = [
            host.create(LOGITS_PROCESSORS, name, vocab_size=self.facts.vocab_size) for name in names
        ]
        self._processors = dict(zip(names, made, strict=True))
        self._guards = {name: host.guard(LOGITS_PROCESSORS, name) for name in names}
        self._asked: dict[int, dict[str, Any]] = {}
        self._histories: dict[int, list[int]] = {}
        self._pending: deque[PendingStep] = deque()
        self._held: SampleRows | None = None
        self._graphs: DecodeGraphs | None = None
        if self.device.type == "cuda" and not config.device.enforce_eager:
            advice = "lower memory_fraction or max_num_seqs, or set enforce_eager"
            with explained(self.device, "capturing CUDA graphs", advice):
                self._capture(config.scheduler.max_num_seqs)
            self._started.stages.done("graphs")
        self.facts.report.append(option_line(config, self._started.usage))
        self.facts.report.append(stage_line(self._started.stages))

    @torch.inference_mode()
    def _capture(self, max_rows: int) -> None:
        attention = self._started.attention
        if not attention.graph_safe:
            self.facts.report.append(
                f"graphs       none: attention {attention.names} is not graph-safe"
            )
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
        with self._started.guard.call_context("forward"):
            self._graphs.capture(sizes, progress)
        used = before - torch.cuda.mem_get_info(self.device)[0]
        self._started.usage.graphs = used
        self.facts.report.append(f"graphs       {used / GIB:8.3f} GiB: {len(sizes)} batch sizes")

    # ------------------------------------------------------------------------------- steps

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        """Launch a step. With deferred sampling, stop after the logits."""
        pending = PendingStep(plan.id, self.device)
        self._pending.append(pending)
        captured = None
        if self._graphs is not None and plan.decodes == len(plan.slots):
            captured = self._graphs.find(plan.decodes)
        self._change_slots(plan, captured is not None)
        if self._graphs is None or captured is None:
            rows = self._launch_eager(plan, pending)
        else:
            logits = self._graphs.forward(captured, plan.slots, plan.starts)
            features = None if plan.held else self._sampler.features(plan.slots)
            which = list(range(plan.decodes))
            if features is not None:
                sampled = self._graphs.sample(captured, plan.decodes, features)
                pending.sampled(which, plan.slots, sampled)
                rows = None
            else:
                slots, positions = (
                    captured.inputs[0, : len(which)],
                    captured.inputs[1, : len(which)],
                )
                rows = SampleRows(which, plan.slots, logits, slots, positions + 1)
        if plan.held:
            self._held = rows
            return
        if rows is not None:
            self._sample(pending, rows)
        pending.record()

    @torch.inference_mode()
    def sample(self, edits: StepEdits | None) -> None:
        """Complete the newest step, which has deferred sampling."""
        pending = self._pending[-1]
        if self._held is not None:
            self._sample(pending, self._processed(self._held, pending), edits)
        self._held = None
        pending.record()

    def _launch_eager(self, plan: StepPlan, pending: PendingStep) -> SampleRows | None:
        inputs = build_inputs(
            plan, self._tables, self._last_tokens, self.facts.page_size, self._packer
        )
        asked = any(slot in self._prompts for slot in plan.slots)
        step = self._started.attention.plan(inputs.batches, None if asked else inputs.wanted)
        hidden = self._forward(inputs.input_ids, inputs.positions, step)
        if asked:
            self._prompt_logprobs(plan, hidden, pending)
        if not inputs.sampled:
            return None
        if inputs.wanted is not None and len(hidden) != len(inputs.wanted):
            hidden = hidden.index_select(0, inputs.wanted)
        which = [row for row, samples in enumerate(plan.samples) if samples]
        return SampleRows(
            which,
            inputs.sampled,
            self._logits(hidden),
            inputs.sample_slots,
            inputs.sample_positions,
        )

    def _forward(self, ids: Tensor, positions: Tensor, step: Step) -> Tensor:
        guard = self._started.guard
        with guard.call_context("forward", in_step=True):
            hidden = self.model.forward(ids, positions, step)
            shape: tuple[int, ...] = getattr(hidden, "shape", ())
            few = ids if step.wanted is None else step.wanted
            if len(shape) != 2 or shape[0] not in (len(ids), len(few)):
                guard.fail_result("forward", hidden, f"a tensor [{len(ids)}, hidden]")
        return hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        guard, wanted = self._started.guard, (len(hidden), self.facts.vocab_size)
        with guard.call_context("logits", in_step=True):
            logits = self.model.logits(hidden)
            if getattr(logits, "shape", ()) != wanted:
                guard.fail_result("logits", logits, f"a tensor {list(wanted)}")
        return logits

    def _sample(
        self, pending: PendingStep, rows: SampleRows, edits: StepEdits | None = None
    ) -> None:
        bitmask = bitmask_rows = None
        if edits is not None and edits.rows:
            at = {row: i for i, row in enumerate(rows.rows)}
            words = np.frombuffer(edits.masks, dtype=np.int32).reshape(len(edits.rows), -1)
            which = np.array([at[row] for row in edits.rows], dtype=np.int64)
            bitmask, bitmask_rows = self._packer.upload(words.copy(), which)
        output = self._sampler.sample(
            rows.logits,
            rows.slots,
            rows.positions,
            rows.host_slots,
            bitmask=bitmask,
            bitmask_rows=bitmask_rows,
            raw=rows.raw,
        )
        self._last_tokens.index_copy_(0, rows.slots, output.tokens)
        tokens = marked(output.tokens, output.bad)
        pending.sampled(rows.rows, rows.host_slots, tokens, output.logprobs)

    def _processed(self, rows: SampleRows, pending: PendingStep) -> SampleRows:
        """Apply the logits processors that the rows' requests name.

        If a processor fails, it is applied to each row separately, so that only the rows for which
        it fails end.
        """
        logits = rows.logits
        for name, processor in self._processors.items():
            asked = [i for i, s in enumerate(rows.host_slots) if name in self._asked.get(s, {})]
            if not asked:
                continue
            if logits is rows.logits:
                logits = logits.float().clone()
            for i in asked:
                pending.edited.setdefault(i, []).append(name)
            try:
                self._edit(name, processor, logits, asked, rows.host_slots)
            except PluginLoadError:
                for i in asked:
                    try:
                        self._edit(name, processor, logits, [i], rows.host_slots)
                    except PluginLoadError as error:
                        log.warning("%s", error, exc_info=error)
                        pending.faults[i] = str(error)
        return rows if logits is rows.logits else replace(rows, logits=logits, raw=rows.logits)

    def _edit(
        self,
        name: str,
        processor: LogitsProcessor,
        logits: Tensor,
        which: list[int],
        slots: list[int],
    ) -> None:
        """Apply ``processor`` to rows ``which``. Raises ``PluginLoadError``, changing nothing."""
        index = torch.tensor(which, device=self.device)
        with self._guards[name].call_context("apply", in_step=True):
            edited = processor.apply(
                logits.index_select(0, index),
                [self._asked[slots[i]][name] for i in which],
                [self._histories[slots[i]] for i in which],
            )
            logits.index_copy_(0, index, edited)

    def _change_slots(self, plan: StepPlan, captured: bool) -> None:
        if plan.closed:
            self._sampler.close(plan.closed)
            for slot in plan.closed:
                self._prompts.pop(slot, None)
                self._asked.pop(slot, None)
                self._histories.pop(slot, None)
        if plan.opened:
            self._sampler.open(plan.opened)
            for start in plan.opened:
                top = start.params.prompt_logprobs
                if top is not None and len(start.tokens) == start.prompt_len:
                    self._prompts[start.slot] = (start.tokens, top)
                if self._processors and start.params.extra:
                    self._asked[start.slot] = start.params.extra
                    self._histories[start.slot] = list(start.tokens)
        if plan.page_writes:
            size = self.facts.page_size
            columns = (start // size for start in plan.starts)
            current = dict(zip(plan.slots, columns, strict=True)) if captured else {}
            self._tables.write(plan.page_writes, current)

    def _prompt_logprobs(self, plan: StepPlan, hidden: Tensor, pending: PendingStep) -> None:
        """Compute logprobs of the prompt tokens after those of this step, where requested."""
        first = 0
        rows = zip(plan.slots, plan.starts, plan.counts, strict=True)
        for row, (slot, start, count) in enumerate(rows):
            if slot in self._prompts:
                prompt, top = self._prompts[slot]
                last = min(start + count, len(prompt) - 1)
                if last > start:
                    targets = torch.tensor(prompt[start + 1 : last + 1], device=self.device)
                    logits = self._logits(hidden[first : first + last - start])
                    pending.prompt(row, prompt_logprobs(logits, targets, top))
            first += count

    def forget(self) -> None:
        """Drop the newest step, which has failed, so that ``get_output`` does not return it."""
        self._pending.pop()
        self._held = None

    def collect(self) -> StepResult:
        """Wait for the oldest step in flight and return its output."""
        pending = self._pending.popleft()
        result = pending.result()
        for i in pending.edited.keys() & set(result.bad) - result.faults.keys():
            guards = [self._guards[name] for name in pending.edited[i]]
            for guard in guards:
                guard.failed("apply")
            ids = ", ".join(guard.entry.id for guard in guards)
            result.faults[i] = f"{ids} left no token to sample: the logits are NaN or all masked"
        if self._histories:
            for slot, token in zip(pending.slots, result.tokens, strict=True):
                if slot in self._histories:
                    self._histories[slot].append(token)
        return result
