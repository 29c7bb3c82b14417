"""One engine from its start to its end, its clients, its faults, and what holds at every step."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import time
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from simulator.checks import check_frontend, check_quiet, check_shut
from simulator.clients import Client
from simulator.device import SimulatedExecutor
from simulator.grammar import SimulatedForks
from simulator.loop import SimulatedLoop
from simulator.parts import CheckedCore, create_plugins
from simulator.plans import Plan, Setup
from simulator.process import EngineProcess
from simulator.threads import SimulatedEvent, SimulatedPool, SimulatedThread
from simulator.world import StepsSpent, Violation, World
from treadle.config import EngineConfig, PluginConfig, from_options
from treadle.engine.core import EngineCore
from treadle.engine.process import serve
from treadle.entrypoints.async_llm import AsyncLLM
from treadle.errors import EngineDeadError
from treadle.plugins import PluginManager

__all__ = ("Episode", "simulate")

MAX_SECONDS = 600.0
"""Seconds of virtual time within which every client has its answer."""
HEARTBEAT, PATIENCE = 1.0, 20.0
TOLD_WITHIN = 5.0
"""Seconds after the end of the engine within which everybody who does not pause knows."""


class Episode:
    """One simulated run. Everything in it follows from ``seed``."""

    def __init__(self, seed: int, max_steps: int = 10**9) -> None:
        self.world = World(seed, max_steps)
        self.setup = Setup.draw(self.world.random)
        self.loop = SimulatedLoop(self.world)
        self.clients = [Client(self, plan) for plan in self.setup.plans]
        self.num_sequences = sum(plan.params.n for plan in self.setup.plans)
        self.aborted_ids: set[str] = set()
        self.ended: set[str] = set()
        self.left_at: dict[str, float] = {}
        self.num_engine_steps = 0
        self.is_engine_lost = False
        self.is_shut = False
        self.shutdown: asyncio.Task[None] | None = None
        self.lost_at: float | None = None
        self.core: CheckedCore | None = None
        self.executor: SimulatedExecutor | None = None
        self.process: EngineProcess | None = None
        self.llm: AsyncLLM

    def num_with_id(self, plan: Plan) -> int:
        return sum(other.request_id == plan.request_id for other in self.setup.plans)

    # -- parts ---------------------------------------------------------------------------

    def create_executor(self) -> SimulatedExecutor:
        self.executor = SimulatedExecutor(self.world, self.setup)
        return self.executor

    def plugin_manager(self, config: PluginConfig | None = None) -> PluginManager:
        return create_plugins(config, self.create_executor)

    def spawn(self, entry: str, *, buffer_bytes: int | None = None) -> tuple[Any, Any]:
        self.process = process = EngineProcess(
            self.world, lambda channel: serve(channel, self.create_core)
        )
        process.loop = self.loop
        self.setup.process = process
        return process, SimpleNamespace(close=lambda: None)

    async def connect(self, protocol: asyncio.Protocol, _: Any) -> EngineProcess:
        assert self.process is not None
        await asyncio.sleep(0)
        self.process.start(protocol)
        return self.process

    def create_core(self, config: EngineConfig) -> EngineCore:
        CheckedCore.episode = self
        self.core = CheckedCore(config, self.plugin_manager(config.plugins))
        return self.core

    def config(self) -> EngineConfig:
        setup = self.setup
        return from_options(
            model="simulated:model", tokenizer_mode="simulated", renderer="simulated",
            generation_config="treadle", distributed_executor_backend="simulated",
            page_size=setup.page_size, num_pages=setup.num_pages,
            max_model_len=setup.max_model_len, max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=setup.max_num_batched_tokens,
            chunked_prefill_size=setup.chunked_prefill_size,
            max_step_ms=setup.max_step_ms,
            scheduling_policy=setup.scheduling_policy,
            enable_prefix_caching=setup.enable_prefix_caching,
            max_num_queued_reqs=setup.max_num_queued_reqs,
            max_num_queued_grammars=setup.max_num_queued_grammars,
        )  # fmt: skip

    @contextlib.contextmanager
    def replaced(self) -> Iterator[None]:
        """Clock, processes and threads of the real code are those of the world."""
        world = self.world
        event = SimpleNamespace(Event=lambda: SimulatedEvent(world))

        def pool(count: int, **_: Any) -> SimulatedPool:
            return SimulatedPool(world, count)

        names: dict[str, Any] = {
            "treadle.engine.client.spawn": self.spawn,
            "treadle.text.assets.PluginManager": self.plugin_manager,
            "treadle.structured_output.checker.ForkServer": partial(SimulatedForks, world),
            "treadle.structured_output.compile_queue.ThreadPoolExecutor": pool,
            "treadle.structured_output.compile_queue.monotonic": self.loop.time,
            "treadle.processes.fair_queue.monotonic": self.loop.time,
            "treadle.structured_output.manager.ThreadPoolExecutor": pool,
            "treadle.structured_output.manager.threading": event,
            "treadle.text.text_pool.WatchdogThread": partial(SimulatedThread, world),
        }
        with contextlib.ExitStack() as stack:
            for name, value in names.items():
                stack.enter_context(patch(name, value))
            for clock in ("monotonic", "perf_counter"):
                stack.enter_context(patch.object(time, clock, lambda: world.now))
            # The engine ends with its parent, which this process may lose at any time.
            stack.enter_context(patch.object(os, "getppid", lambda: 1))
            stack.enter_context(patch.object(logging, "basicConfig", lambda **_: None))
            stack.enter_context(self.loop.installed())
            logging.disable(logging.CRITICAL)
            stack.callback(logging.disable, logging.NOTSET)
            stack.callback(self._drop_tasks)
            stack.callback(world.end)
            yield

    def _drop_tasks(self) -> None:
        """Close what a violation has left, while it is still on its loop."""
        asyncio._set_running_loop(self.loop)
        for task in asyncio.all_tasks(self.loop):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            with contextlib.suppress(Exception, asyncio.CancelledError):
                task.get_coro().close()  # type: ignore[union-attr]
        asyncio._set_running_loop(None)

    # -- the run -------------------------------------------------------------------------

    def run(self) -> None:
        """Raises ``Violation``, or ``StepsSpent`` if ``max_steps`` come first."""
        with self.replaced():
            self.loop.connect = self.connect
            asyncio._set_running_loop(self.loop)
            self.llm = AsyncLLM(config=self.config())
            asyncio._set_running_loop(None)
            main = self.loop.create_task(self._main())
            try:
                while not main.done():
                    if (process := self._new_process()) is not None:
                        process.main()
                    elif self.world.is_idle:
                        self.world.fail("everything waits, and nothing will happen")
                    else:
                        self.world.run_until(
                            self.world.now + 1.0,
                            lambda: main.done() or self._new_process() is not None,
                        )
                main.result()
            except (Violation, StepsSpent):
                raise
            except BaseException as error:
                raise self.world.note_violation(f"the episode raised {error!r}") from error
            if self.world.violation is not None:
                raise self.world.violation

    def _new_process(self) -> EngineProcess | None:
        """The engine's process, if it has still to run."""
        process = self.process
        is_new = process is not None and not process.is_started and not process.is_killed
        return process if is_new else None

    async def _main(self) -> None:
        world = self.world
        monitor = asyncio.create_task(self._monitor())
        if self.setup.fault not in ("none", "start", "steps", "rows"):
            world.after(self.setup.fault_after, self._inject)
        if self.setup.starts_first:
            with contextlib.suppress(Exception):
                await self.llm.start()
        await self._run_clients()
        await asyncio.sleep(2 * HEARTBEAT)
        check_frontend(world, self.llm)
        if not self.is_engine_lost and not self.is_shut and self.llm.alive:
            await asyncio.sleep(60.0)
            check_quiet(world, self.core, await self.llm.stats(PATIENCE))
        if self.shutdown is not None:  # what is shut down stays so, whatever is asked of it later
            await self.shutdown
            check_shut(world, self.process, self.executor)
        monitor.cancel()
        await asyncio.gather(monitor, return_exceptions=True)
        self.is_shut = True
        await self.llm.shutdown()
        await asyncio.sleep(1.0)
        check_shut(world, self.process, self.executor)

    async def _run_clients(self) -> None:
        world = self.world
        tasks = [asyncio.create_task(client.run()) for client in self.clients]
        _, late = await asyncio.wait(tasks, timeout=MAX_SECONDS)
        if late:
            names = [c.plan.number for c in self.clients if c.outcome is None]
            world.fail(f"clients {names} still wait after {MAX_SECONDS:g} s")
        for task in tasks:
            if not task.cancelled() and task.exception() is not None:
                error = task.exception()
                world.fail(f"a client raised {error!r}")
        if self.lost_at is not None:
            for client in self.clients:
                after = client.ended_at - max(self.lost_at, client.plan.arrival)
                if after > TOLD_WITHIN and not client.plan.pause:
                    world.fail(f"client {client.plan.number} was told {after:g} s after the end")

    # -- faults --------------------------------------------------------------------------

    def _inject(self) -> None:
        fault, process = self.setup.fault, self.process
        if fault == "shutdown":
            self._shut_down()
            return
        if process is None or process.poll() is not None:
            return
        if self.core is None and fault != "start_kill":
            self.world.after(0.1, self._inject)
            return
        self.world.log("fault", fault)
        self.is_engine_lost = True
        if fault in ("kill", "start_kill", "cut", "garbage"):
            self.lost_at = self.world.now
        if fault in ("kill", "start_kill"):
            process.kill()
        elif fault == "cut":
            process.cut()
        elif fault == "garbage":
            process.to_client(b"\x05\0\0\0\x93\xff\xff\xff\xff")
        elif fault == "worker" and self.executor is not None:
            self.executor.is_worker_dead = True
        elif fault == "hang":
            self.setup.is_hanging = True

    def _shut_down(self) -> None:
        """At any time, even during or before the start."""
        self.world.log("shutdown")
        self.is_engine_lost = self.is_shut = True
        self.shutdown = self.loop.create_task(self.llm.shutdown())

    async def _monitor(self) -> None:
        """What a server does: ask the engine again and again, and end what hangs."""
        while True:
            await asyncio.sleep(HEARTBEAT)
            if not self.llm.alive:
                continue
            try:
                stats = await self.llm.stats(PATIENCE)
            except EngineDeadError as error:
                if not self.is_engine_lost and not self.is_shut:
                    self.world.fail(f"the engine is said to be dead: {error}")
                if "hangs" in str(error):
                    if not self.setup.is_hanging:
                        self.world.fail("the engine is said to hang")
                    self._shut_down()
            else:
                if stats.integrity_faults:
                    self.world.fail("the engine has found faults of integrity")


def simulate(episode: Episode) -> None:
    """Run an episode to its end, or as far as its steps go. Raises ``Violation``."""
    was_enabled = gc.isenabled()
    gc.disable()  # when it runs depends on what ran before
    try:
        with contextlib.suppress(StepsSpent):
            episode.run()
    finally:
        if was_enabled:
            gc.enable()
