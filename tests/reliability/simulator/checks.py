"""What holds for each step, and once all clients are done: nothing of them is left anywhere."""

from __future__ import annotations

from typing import Any

from simulator.device import SimulatedExecutor
from simulator.process import EngineProcess
from simulator.world import World
from treadle.api.stats import EngineStats
from treadle.engine.core import EngineCore
from treadle.scheduler.scheduler import Scheduler
from treadle.scheduler.step_pace import MIN_CHUNK

__all__ = ("check_frontend", "check_quiet", "check_shut", "check_step_time")


def check_frontend(world: World, llm: Any) -> None:
    client = llm._client
    left = {
        "streams": llm._streams,
        "sequences": llm._sequences,
        "pings": {} if llm.alive else client._pings,
        "requests": llm._outputs._requests,
        "outputs": llm._outputs._sequences,
        "unsent": client._requests_to_add + client._ids_to_abort,
        "texts": [*llm.texts._pending, *llm.texts._running],
    }
    for name, value in left.items():
        if value:
            world.fail(f"all clients are done, but the frontend has {name}: {value}")


def check_quiet(world: World, core: EngineCore | None, stats: EngineStats) -> None:
    """For an engine that lives, and has had the time to hear of all aborts."""
    assert core is not None
    if stats.num_running or stats.num_waiting or stats.num_used_pages or stats.num_grammars_waiting:
        world.fail(f"all clients are done, but the engine has {stats}")
    if core.has_work or core._waiting_for_grammar or core.scheduler.running:
        world.fail("all clients are done, but the engine has work")
    for job in core._structured_output.queue.jobs.values():
        if not job.done():
            world.fail(f"all clients are done, but {job.spec.source!r} is being compiled")


def check_shut(
    world: World, process: EngineProcess | None, executor: SimulatedExecutor | None
) -> None:
    if process is not None and process.poll() is None:
        world.fail("the engine process has outlived its client")
    if executor is not None and not executor.num_shutdowns:
        world.fail("the executor was not shut down")


def check_step_time(world: World, scheduler: Scheduler) -> None:
    """The newest step is as short as ``max_step_ms`` demands, by what its scheduler knows."""
    step, pace = scheduler._in_flight[-1], scheduler.pace
    if not pace.max_seconds or not step.num_decodes or not step.has_chunk:
        return
    decodes = step.num_computed_tokens[: step.num_decodes]
    generation = pace.seconds([1.0, len(decodes), 0.0, sum(decodes), 0.0, 0.0])
    start, count = step.num_computed_tokens[-1], step.num_scheduled_tokens[-1]
    chunk = [0.0, 1.0, count, start + count, count * (start + count / 2), 1.0]
    minimum = pace.seconds(chunk) if count <= MIN_CHUNK else 0.0
    bound = max(pace.max_seconds, generation + pace.max_seconds / 2)
    if pace.seconds(step.work) - minimum > 1.000001 * bound:
        world.fail(
            f"step {step.id} takes {pace.seconds(step.work):g} s beside {len(decodes)} sequences that "
            f"generate; {bound:g} s are allowed"
        )
