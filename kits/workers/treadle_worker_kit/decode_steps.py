"""Steps of a decoder that a plugin runs in one call (``decode_step``), in the place of layer by layer.

They take the place of captured steps: inputs are a few numbers for each row, and nothing of torch
is called between the scheduler's output and the logits.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from treadle.api.attention import KernelRequest
from treadle.api.devices import device_info
from treadle.api.kinds import KERNEL_OPS
from treadle.api.step_types import SchedulerOutput
from treadle.config import EngineConfig
from treadle.errors import TreadleError
from treadle.plugins import PluginManager
from treadle.runner.inputs import expand_tokens
from treadle.runner.model_runner import LoadedModel, ModelRunner
from treadle.runner.outputs import flag_invalid
from treadle.sampling.features import Features
from treadle_layers_kit.decode_step import DECODE_STEP, DecodePlan, DecodeProgram, DecoderFacts

__all__ = ("DecodeSteps", "ProgramSteps")

log = logging.getLogger(__name__)


class DecodeSteps:
    """The search for a plugin that runs whole steps: before the weights are loaded, and after."""

    def __init__(self, plugins: PluginManager) -> None:
        self._plugins = plugins
        self._plan: DecodePlan | None = None
        self._name = ""
        self._refusals: list[str] = []

    def plan(self, model: nn.Module, device: torch.device, dtype: str) -> None:
        """Ask the plugins for a plan for the empty ``model``; keep why there is none."""
        if device.type != "cpu":
            return
        request = KernelRequest(device_info(device), dtype, {})
        offers, refusals = self._plugins.offers(KERNEL_OPS, op=DECODE_STEP, request=request)
        self._refusals = [f"{r.name}: {'; '.join(r.reasons)}" for r in refusals]
        if not offers:
            return
        offer = self._plugins.best_offer(KERNEL_OPS, op=DECODE_STEP, request=request)
        if offer is None:
            return
        plan = offer.load()(model)
        if isinstance(plan, str):
            self._refusals.append(f"{offer.name}: {plan}")
        else:
            self._plan, self._name = plan, offer.name

    def install(self, runner: ModelRunner, loaded: LoadedModel, config: EngineConfig) -> list[str]:
        """Let the runner's steps be those of the plan. Return sentences for the start-up report."""
        if self._plan is None:
            return [f"Steps run layer by layer in torch ({reason})." for reason in self._refusals]
        slots = len(runner.tables.tables_cpu[0])
        facts = DecoderFacts(
            page_size=loaded.info.page_size,
            max_model_len=loaded.info.max_model_len,
            max_rows=slots,
            max_tokens=config.scheduler.max_num_batched_tokens,
            threads=config.device.cpu_threads or torch.get_num_threads(),
            attention=[group.name for group in loaded.attention],
            cache_groups=[group.cache_group for group in loaded.attention],
            page_tables=runner.tables.tables_cpu,
            last_tokens=runner.last_tokens[:slots],
        )
        try:
            program, sentence = self._plan.compile(facts)
        except TreadleError as error:
            log.warning("%s: %s", self._name, error)
            return [f"Steps run layer by layer in torch ({self._name}: {error})."]
        runner.graphs = ProgramSteps(runner, program)
        return [sentence]


@dataclass(slots=True)
class ProgramStep:
    """One step of a program: slots and positions of its tokens, and its logits."""

    slots: Tensor  # int64 [tokens]
    positions: Tensor  # int64 [tokens]
    logits: Tensor
    """Of the rows that are sampled; empty before ``ProgramSteps.forward``."""

    def columns(self, count: int) -> tuple[Tensor, Tensor]:
        """Return slots and positions of the first ``count`` tokens."""
        if count == self.slots.shape[0]:
            return self.slots, self.positions
        return self.slots[:count], self.positions[:count]


class ProgramSteps:
    """Steps of a ``DecodeProgram``, as what replays captured steps."""

    def __init__(self, runner: ModelRunner, program: DecodeProgram) -> None:
        self._program = program
        self._sampler = runner.sampler
        self._last_tokens = runner.last_tokens
        self._vocab_size = runner.info.vocab_size
        # A step that only decodes makes no tensors: a small model's step takes no longer than making some.
        self._columns = np.zeros((2, len(runner.tables.tables_cpu[0])), dtype=np.int64)
        self._views: dict[int, tuple[Tensor, Tensor]] = {}
        self._empty = torch.empty(0)

    def find(self, step: SchedulerOutput) -> ProgramStep:
        """Return the inputs of a step; a program runs every step."""
        if step.tokens:
            slots, positions = expand_tokens(step)
            return ProgramStep(torch.from_numpy(slots), torch.from_numpy(positions), self._empty)
        rows, columns = len(step.slots), self._columns
        columns[0, :rows], columns[1, :rows] = step.slots, step.num_computed_tokens
        if rows not in self._views:
            self._views[rows] = (
                torch.from_numpy(columns[0, :rows]),
                torch.from_numpy(columns[1, :rows]),
            )
        return ProgramStep(*self._views[rows], self._empty)

    def forward(self, captured: ProgramStep, step: SchedulerOutput) -> Tensor:
        """Run the step; return logits ``[sampled rows, vocab]``, valid until the next.

        Raises ``ValueError`` for an id that is not in the vocabulary, which the engine refuses earlier.
        """
        if step.tokens and not 0 <= min(step.tokens) <= max(step.tokens) < self._vocab_size:
            raise ValueError(
                f"token ids are {min(step.tokens)} to {max(step.tokens)}; the vocabulary has "
                f"{self._vocab_size}"
            )
        captured.logits = self._program.run(
            step.slots,
            step.num_computed_tokens,
            step.num_scheduled_tokens,
            # Of a step that only decodes, every row has logits.
            step.needs_sampling if step.tokens else [True] * len(step.slots),
            step.num_decodes,
            step.tokens,
        )
        return captured.logits

    def sample(
        self,
        captured: ProgramStep,
        rows: int,
        features: Features,
        masks: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> Tensor:
        """Sample after ``forward``. Return tokens ``[rows]``, from ``flag_invalid``."""
        if not features.random and masks is None:
            return self._program.argmax()
        slots, positions = captured.slots, captured.positions
        bitmask = None
        if masks is not None:
            words = torch.from_numpy(np.array(masks[1]))
            bitmask = torch.full((rows, words.shape[1]), -1, dtype=torch.int32)
            bitmask.index_copy_(0, torch.from_numpy(masks[0]), words)
        tokens, invalid = self._sampler.sample_graphable(
            captured.logits, slots, positions + 1, features, bitmask
        )
        self._last_tokens.index_copy_(0, slots, tokens)
        return flag_invalid(tokens, invalid)
