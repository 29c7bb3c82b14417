"""What the core gets from outside: plugins, and the engine core with checks after each step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from simulator.checks import check_step_time
from simulator.device import SimulatedExecutor
from simulator.grammar import Compiler
from simulator.model import SimulatedTokenizer
from treadle.api import impl
from treadle.api.files import ModelFiles
from treadle.api.requests import TokenOutput
from treadle.api.step_types import SchedulerOutput
from treadle.config import PluginConfig
from treadle.engine.core import EngineCore
from treadle.plugins import Entry, PluginManager

if TYPE_CHECKING:
    from simulator.episode import Episode

__all__ = ("CheckedCore", "create_plugins")

ABORTED_WITHIN = 0.2
"""Seconds within which an engine hears that nobody reads a request any more."""


class SimulatedPlugin:
    """Everything around the core that is simulated, as one plugin."""

    def __init__(self, create_executor: Callable[[], SimulatedExecutor]) -> None:
        self._create_executor = create_executor

    @impl
    def treadle_executor(self, name: str) -> SimulatedExecutor:
        return self._create_executor()

    @impl
    def treadle_grammar_compiler(self, name: str) -> Compiler:
        return Compiler()

    @impl
    def treadle_model_source(self, scheme: str) -> Any:
        files = ModelFiles(Path("/simulated"), (), {})
        return SimpleNamespace(resolve=lambda ref, patterns: files)

    @impl
    def treadle_tokenizer(self, mode: str) -> SimulatedTokenizer:
        return SimulatedTokenizer()

    @impl
    def treadle_renderer(self, mode: str) -> Any:
        return SimpleNamespace(render=str, encode=list)


ENTRIES = [
    *(("scheduling_policies", key, "treadle.scheduler.policies") for key in ("fcfs", "priority")),
    *(
        (kind, "simulated", "simulated")
        for kind in ("executors", "structured_output", "model_sources", "tokenizers", "renderers")
    ),
]


class CheckedCore(EngineCore):
    """The engine core; after each step its invariants are checked."""

    episode: Episode

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        schedule = self.scheduler.schedule

        def checked_schedule() -> SchedulerOutput | None:
            output = schedule()
            if output is not None:
                check_step_time(self.episode.world, self.scheduler)
            return output

        self.scheduler.schedule = checked_schedule  # type: ignore[method-assign]

    def abort_requests(self, ids: Any) -> None:
        names = list(ids)
        self.episode.world.log("abort", *names)
        super().abort_requests(names)
        self.episode.ended.update(names)

    def step(self) -> list[TokenOutput]:
        episode, world = self.episode, self.episode.world
        world.count_step()
        outputs = super().step()
        episode.num_engine_steps += 1
        for output in outputs:
            world.log("token", output.id, output.token_ids, output.finish_reason)
            self._check_is_wanted(output.id)
            if output.id in episode.ended:
                world.fail(f"sequence {output.id} has ended, and has an output")
            if output.finish_reason is not None:
                episode.ended.add(output.id)
        if faults := self.scheduler.check_integrity():
            world.fail("; ".join(faults))
        queued = len(self.scheduler.waiting._heap)
        if queued > 2 * len(self.scheduler.waiting) + 64:
            world.fail(f"the queue keeps {queued} sequences of which few are waiting")
        return outputs

    def _check_is_wanted(self, name: str) -> None:
        episode, now = self.episode, self.episode.world.now
        if episode.llm._outputs.request_of(name) is None:
            seconds = now - episode.left_at.setdefault(name, now)
            if seconds > ABORTED_WITHIN:
                episode.world.fail(
                    f"sequence {name} runs, and nobody has wanted it for {seconds:g} s"
                )


def create_plugins(
    config: PluginConfig | None, create_executor: Callable[[], SimulatedExecutor]
) -> PluginManager:
    entries = [Entry(kind, key, target, "simulated", "1") for kind, key, target in ENTRIES]
    manager = PluginManager(config, source=lambda: entries)
    manager.loader.add("simulated:simulated", SimulatedPlugin(create_executor))
    return manager
