"""The model runner: runs the steps of a model on one device."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treadle.api.engine import LogitsProcessor
from treadle.api.kinds import LOGITS_PROCESSORS, MODELS
from treadle.api.models import CausalModel
from treadle.api.result_checks import unexpected
from treadle.api.step_types import EngineInfo, GrammarOutput, ModelRunnerOutput, SchedulerOutput
from treadle.config import EngineConfig
from treadle.errors import PluginLoadError
from treadle.plugins import PluginManager
from treadle.runner.attention import AttentionGroup, build_metadata
from treadle.runner.graphs import CapturedStep, StepGraphs
from treadle.runner.inputs import PageTables, build_inputs
from treadle.runner.outputs import InFlightOutput, flag_invalid
from treadle.sampling.logprobs import prompt_logprobs
from treadle.sampling.sampler import Sampler
from treadle.sampling.transfer import Packer

__all__ = ("LoadedModel", "ModelRunner")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded model with its KV cache; ``model`` is behind the boundary of its plugin."""

    model: CausalModel
    device: torch.device
    attention: Sequence[AttentionGroup]
    info: EngineInfo


@dataclass(frozen=True, slots=True)
class SampleRows:
    """The rows of a step that need sampling, with their logits."""

    rows: list[int]
    """Indices in the scheduler output."""
    slots_cpu: list[int]
    logits: Tensor  # [sampled, vocab]
    slots: Tensor  # int64 [sampled]
    positions: (
        Tensor  # int64 [sampled], index of the new token in its sequence; if captured, of the last
    )
    raw: Tensor | None = None
    """The model's logits, if logits processors have edited ``logits``; else ``None``."""
    captured: CapturedStep | None = None
    """The forward pass that was replayed, if one was."""


class ModelRunner:
    """Model, page tables and sampler of a rank. Use it from one thread.

    On CUDA, ``execute_model`` and ``sample_tokens`` do not wait for the device. ``get_output``
    waits for the oldest step only.
    """

    def __init__(self, config: EngineConfig, plugins: PluginManager, loaded: LoadedModel) -> None:
        self.model = loaded.model
        self.forward = loaded.model.forward
        """The forward pass of steps that ``graphs`` do not hold; whoever starts the runner may set it."""
        self.graphs: StepGraphs[Any] | None = None
        """What replays steps; whoever starts the runner may set it."""
        self.count_compilations: Callable[[], int] = int
        """Returns how many kernels were compiled since the start; whoever starts the runner may set it."""
        self._attention = loaded.attention
        self.device = loaded.device
        self.info = loaded.info
        slots = config.scheduler.max_num_seqs + 1  # the last one is for padding rows
        columns = -(-self.info.max_model_len // self.info.page_size)
        self.packer = Packer(self.device)
        groups = len(self.info.kv_cache_groups)
        self.tables = PageTables(groups, slots, columns, self.packer, self.device)
        # Of each slot; behind them is room for the prompt ids of a captured step.
        num_ids = slots + config.scheduler.max_num_batched_tokens
        self.last_tokens = torch.zeros(num_ids, dtype=torch.int64, device=self.device)
        self._prompts: dict[int, tuple[list[int], int]] = {}
        names = config.plugins.logits_processors
        self.sampler = Sampler(slots, self.info.vocab_size, self.device)
        self._processors = {
            name: plugins.create_guarded(LOGITS_PROCESSORS, name, vocab_size=self.info.vocab_size)
            for name in names
        }
        self._processor_guards = {name: plugins.guard(LOGITS_PROCESSORS, name) for name in names}
        self._model_guard = plugins.guard(MODELS, self.info.architecture)
        self._processor_args: dict[int, dict[str, Any]] = {}
        self._histories: dict[int, list[int]] = {}
        self._pending: deque[InFlightOutput] = deque()
        self._deferred: SampleRows | None = None

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """Launch a step. With deferred sampling, stop after the logits."""
        pending = InFlightOutput(scheduler_output.id, self.device)
        self._pending.append(pending)
        self._update_slots(scheduler_output)
        chunk_slots = scheduler_output.slots[scheduler_output.num_decodes :]
        needs_prompt_logprobs = not self._prompts.keys().isdisjoint(chunk_slots)
        captured = None
        if self.graphs is not None and not needs_prompt_logprobs:
            captured = self.graphs.find(scheduler_output)
        if scheduler_output.page_table_updates:
            columns = (
                start // self.info.page_size for start in scheduler_output.num_computed_tokens
            )
            current = dict(zip(scheduler_output.slots, columns, strict=True)) if captured else {}
            self.tables.write(scheduler_output.page_table_updates, current)
        if self.graphs is None or captured is None:
            rows = self._launch_eager(scheduler_output, pending, needs_prompt_logprobs)
        else:
            logits = self.graphs.forward(captured, scheduler_output)
            rows = self._captured_rows(scheduler_output, captured, logits)
        if scheduler_output.defer_sampling:
            self._deferred = rows
            return
        if rows is not None:
            self._sample(pending, rows)
        pending.record()

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> None:
        """Complete the newest step, which has deferred sampling."""
        pending = self._pending[-1]
        if self._deferred is not None:
            self._sample(pending, self._apply_processors(self._deferred, pending), grammar_output)
        self._deferred = None
        pending.record()

    def _captured_rows(
        self, scheduler_output: SchedulerOutput, captured: CapturedStep, logits: Tensor
    ) -> SampleRows | None:
        if not scheduler_output.tokens:
            slots_cpu = scheduler_output.slots
            slots, positions = captured.columns(len(slots_cpu))
            indices = list(range(len(slots_cpu)))
            return SampleRows(indices, slots_cpu, logits, slots, positions, captured=captured)
        sampled = np.flatnonzero(scheduler_output.needs_sampling)
        if not len(sampled):
            return None
        last = np.cumsum(scheduler_output.num_scheduled_tokens)[sampled] - 1
        slots_cpu = [scheduler_output.slots[row] for row in sampled]
        at, slots = self.packer.upload(last, np.asarray(slots_cpu, dtype=np.int64))
        positions = captured.columns(int(last[-1]) + 1)[1].index_select(0, at) + 1
        logits = logits if len(logits) == len(sampled) else logits.index_select(0, at)
        return SampleRows(sampled.tolist(), slots_cpu, logits, slots, positions)

    def _launch_eager(
        self,
        scheduler_output: SchedulerOutput,
        pending: InFlightOutput,
        needs_prompt_logprobs: bool,
    ) -> SampleRows | None:
        inputs = build_inputs(
            scheduler_output, self.tables, self.last_tokens, self.info.page_size, self.packer
        )
        forward_ctx = build_metadata(
            self._attention,
            inputs.batches,
            None if needs_prompt_logprobs else inputs.logits_indices,
        )
        hidden = self.forward(inputs.input_ids, inputs.positions, forward_ctx)
        if needs_prompt_logprobs:
            self._prompt_logprobs(scheduler_output, hidden, pending)
        if not inputs.sample_slots_cpu:
            return None
        if inputs.logits_indices is not None and len(hidden) != len(inputs.logits_indices):
            hidden = hidden.index_select(0, inputs.logits_indices)
        row_indices = [
            row for row, samples in enumerate(scheduler_output.needs_sampling) if samples
        ]
        return SampleRows(
            row_indices,
            inputs.sample_slots_cpu,
            self._logits(hidden),
            inputs.sample_slots,
            inputs.sample_positions,
        )

    def _logits(self, hidden: Tensor) -> Tensor:
        logits, shape = self.model.compute_logits(hidden), (len(hidden), self.info.vocab_size)
        if getattr(logits, "shape", ()) != shape:
            self._model_guard.fail("compute_logits", unexpected(logits, f"a tensor {list(shape)}"))
        return logits

    def _sample(
        self, pending: InFlightOutput, rows: SampleRows, grammar_output: GrammarOutput | None = None
    ) -> None:
        if self._histories:  # of now: the next step may give a slot to another sequence
            pending.histories = [self._histories.get(slot) for slot in rows.slots_cpu]
        masks = None
        if grammar_output is not None and grammar_output.rows:
            words = np.frombuffer(grammar_output.bitmask, dtype=np.int32)
            masks = (
                np.searchsorted(rows.rows, grammar_output.rows),  # both are in order
                words.reshape(len(grammar_output.rows), -1),
            )
        if self.graphs is not None and rows.captured is not None and rows.raw is None:
            features = self.sampler.features(rows.slots_cpu)
            if features is not None:
                tokens = self.graphs.sample(rows.captured, len(rows.rows), features, masks)
                pending.sampled(rows.rows, tokens)
                return
        bitmask_rows, bitmask = (None, None) if masks is None else self.packer.upload(*masks)
        output = self.sampler.sample(
            rows.logits,
            rows.slots,
            rows.positions if rows.captured is None else rows.positions + 1,
            rows.slots_cpu,
            bitmask=bitmask,
            bitmask_rows=bitmask_rows,
            raw=rows.raw,
        )
        self.last_tokens.index_copy_(0, rows.slots, output.token_ids)
        tokens = flag_invalid(output.token_ids, output.invalid)
        pending.sampled(rows.rows, tokens, output.logprobs)

    def _apply_processors(self, rows: SampleRows, pending: InFlightOutput) -> SampleRows:
        """Apply the logits processors that the rows' requests name.

        If a processor fails, it is applied to each row separately, so that only the rows for which it fails end.
        """
        logits = rows.logits
        for name, processor in self._processors.items() if self._processor_args else ():
            row_indices = [
                i for i, s in enumerate(rows.slots_cpu) if name in self._processor_args.get(s, {})
            ]
            if not row_indices:
                continue
            if logits is rows.logits:
                logits = logits.float().clone()
            for i in row_indices:
                pending.is_edited.setdefault(i, []).append(name)
            try:
                self._apply_logits_processors(name, processor, logits, row_indices, rows.slots_cpu)
            except PluginLoadError:
                for i in row_indices:
                    try:
                        self._apply_logits_processors(name, processor, logits, [i], rows.slots_cpu)
                    except PluginLoadError as error:
                        log.warning("%s", error, exc_info=error)
                        pending.row_errors[i] = str(error)
        return rows if logits is rows.logits else replace(rows, logits=logits, raw=rows.logits)

    def _apply_logits_processors(
        self,
        name: str,
        processor: LogitsProcessor,
        logits: Tensor,
        row_indices: list[int],
        slots: list[int],
    ) -> None:
        """Apply ``processor`` to rows ``row_indices``. Raises ``PluginLoadError``, changing nothing."""
        index = torch.tensor(row_indices, device=self.device)
        edited = processor.apply(
            logits.index_select(0, index),
            [self._processor_args[slots[i]][name] for i in row_indices],
            [self._histories[slots[i]] for i in row_indices],
        )
        logits.index_copy_(0, index, edited)

    def _update_slots(self, scheduler_output: SchedulerOutput) -> None:
        if scheduler_output.freed_slots:
            self.free_slots(scheduler_output.freed_slots)
        if scheduler_output.new_sequences:
            self.sampler.add_sequences(scheduler_output.new_sequences)
            for start in scheduler_output.new_sequences:
                top = start.params.prompt_logprobs
                if top is not None and len(start.token_ids) == start.num_prompt_tokens:
                    self._prompts[start.slot] = (start.token_ids, top)
                if self._processors and start.params.extra_args:
                    self._processor_args[start.slot] = start.params.extra_args
                    self._histories[start.slot] = list(start.token_ids)

    def free_slots(self, slots: list[int]) -> None:
        """Forget the sequences in these slots."""
        self.sampler.remove_slots(slots)
        for slot in slots:
            self._prompts.pop(slot, None)
            self._processor_args.pop(slot, None)
            self._histories.pop(slot, None)

    def _prompt_logprobs(
        self, scheduler_output: SchedulerOutput, hidden: Tensor, pending: InFlightOutput
    ) -> None:
        """Compute logprobs of the prompt tokens after those of this step, where requested."""
        first = 0
        rows = zip(
            scheduler_output.slots,
            scheduler_output.num_computed_tokens,
            scheduler_output.num_scheduled_tokens,
            strict=True,
        )
        for row, (slot, start, count) in enumerate(rows):
            if slot in self._prompts:
                prompt, top = self._prompts[slot]
                last = min(start + count, len(prompt) - 1)
                if last > start:
                    targets = torch.tensor(prompt[start + 1 : last + 1], device=self.device)
                    logits = self._logits(hidden[first : first + last - start])
                    pending.prompt(row, prompt_logprobs(logits, targets, top))
            first += count

    def discard(self) -> None:
        """Drop the newest step, which has failed, so that ``get_output`` does not return it."""
        self._pending.pop()
        self._deferred = None

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the oldest step in flight and return its output."""
        pending = self._pending.popleft()
        result = pending.result(self.count_compilations())
        for i in pending.is_edited.keys() & set(result.invalid_rows) - result.row_errors.keys():
            guards = [self._processor_guards[name] for name in pending.is_edited[i]]
            for guard in guards:
                guard.counter("apply").record_failure()
            ids = ", ".join(guard.entry.id for guard in guards)
            result.row_errors[i] = (
                f"{ids} left no token to sample: the logits are NaN or all masked"
            )
        for history, token in zip(pending.histories, result.sampled_token_ids, strict=False):
            if history is not None:
                history.append(token)
        return result
