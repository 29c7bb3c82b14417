"""The engine core: requests in, tokens out, one step at a time."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterable
from typing import Any

from treadle.api.kinds import EXECUTORS, LOGITS_PROCESSORS, POLICIES, STAT_LOGGERS
from treadle.api.requests import EngineRequest, TokenOutput
from treadle.api.stats import EngineStats
from treadle.api.step_types import EngineFacts, StepEdits
from treadle.cache import KVCache
from treadle.config import EngineConfig
from treadle.errors import (
    EngineError,
    PluginLoadError,
    QueueFullError,
    RequestError,
    TreadleError,
)
from treadle.plugins import PluginManager
from treadle.scheduler.scheduler import Scheduler
from treadle.scheduler.sequence import Sequence
from treadle.structured_output import GrammarDesk, Ticket
from treadle.text.request_checks import check_request

__all__ = ("EngineCore",)

log = logging.getLogger(__name__)

# How long a step may wait for a grammar if no sequence can run.
IDLE_SECONDS = 0.02


class EngineCore:
    """Scheduler, executor and structured output, driven by ``step``. Use it from one thread.

    On CUDA (``num_async_steps`` is 1) one step is in flight while the CPU side processes the
    previous output and schedules the next step. On a CPU each step ends before ``step`` returns.
    """

    def __init__(self, config: EngineConfig, host: PluginManager) -> None:
        self.config = config
        self.host = host
        host.configure(config)
        try:
            self._start()
        except BaseException:
            host.unconfigure()
            raise
        self._guided = GrammarDesk(config, host, self.facts)
        self._compiling: dict[str, tuple[Sequence, Ticket]] = {}
        self._seeds = random.Random(config.model.seed)
        self._steps = 0
        self._step_seconds = 0.0
        self._integrity_faults = 0
        self._closed = False

    def _start(self) -> None:
        config, host = self.config, self.host
        name = config.device.executor
        self._executor = host.create_guarded(EXECUTORS, name, config=config, host=host)
        try:
            self.facts: EngineFacts = self._executor.start()
            self._cache = KVCache(
                self.facts.groups,
                self.facts.page_size,
                prefix_caching=config.cache.enable_prefix_caching,
            )
            policy = host.create_guarded(POLICIES, config.scheduler.scheduling_policy)
            names = config.plugins.stat_loggers
            self._loggers = [host.create_guarded(STAT_LOGGERS, name) for name in names]
            # These instances only validate requests. The model runner has its own, to edit logits.
            names = config.plugins.logits_processors
            self._processors = {
                name: host.create_guarded(LOGITS_PROCESSORS, name, vocab_size=self.facts.vocab_size)
                for name in names
            }
        except BaseException:
            self._stop()
            raise
        self.scheduler = Scheduler(config.scheduler, self._cache, policy, self.facts.eos_ids)

    def _stop(self) -> None:
        """Stop the executor. Only log its errors, since the plugins must be released afterwards."""
        try:
            self._executor.stop()
        except TreadleError as error:
            log.error("%s", error, exc_info=error)

    # ----------------------------------------------------------------------------- requests

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises as ``validate`` does, and ``QueueFullError`` if too many wait."""
        self.validate(request)
        if request.id in self.scheduler.live or request.id in self._compiling:
            raise RequestError(f"request id {request.id!r} is in use", param="request_id")
        waiting = len(self.scheduler.waiting) + len(self._compiling)
        if waiting >= self.config.scheduler.max_queue:
            raise QueueFullError(
                f"{waiting} requests are waiting; max_queue allows "
                f"{self.config.scheduler.max_queue}; try again later"
            )
        root = self._cache.digests.root(request.params.cache_salt)
        sequence = Sequence(request, self.facts, root, self._seed(request))
        sequence.held = bool(request.params.extra)
        if request.params.guided is None:
            self._queue(sequence)
        else:
            self._compiling[request.id] = (sequence, self._guided.submit(request))

    def _queue(self, sequence: Sequence) -> None:
        """Add a sequence to the scheduler. If the policy fails, only this request fails."""
        try:
            self.scheduler.add(sequence)
        except EngineError as error:
            if self.host.switches.strict:
                raise
            log.error("request %s: %s", sequence.id, error)
            failed = TokenOutput(sequence.id, [], "error", error=str(error))
            self.scheduler.outbox.append(failed)

    def validate(self, request: EngineRequest) -> None:
        """Raise ``RequestError`` if it is invalid, ``PluginLoadError`` if a plugin fails."""
        check_request(request, self.facts)
        if request.params.guided is not None:
            self._guided.validate(request.params.guided)
        for name, arguments in (request.params.extra or {}).items():
            if name not in self._processors:
                raise RequestError(
                    f"extra names {name!r}, which is not a logits processor of this engine "
                    f"(logits_processors: {', '.join(self._processors) or 'none'})",
                    param="extra",
                )
            self._check_extra(name, arguments)

    def _check_extra(self, name: str, arguments: Any) -> None:
        """Raise ``RequestError`` for bad arguments, ``PluginLoadError`` if the plugin fails."""
        try:
            self._processors[name].check(arguments)
        except PluginLoadError as error:
            log.warning("%s", error, exc_info=error.__cause__)
            raise

    def _end_if_strict(self, error: TreadleError) -> None:
        if self.host.switches.strict:
            raise EngineError(f"{error} (plugin_strict makes it fatal)") from error

    def _seed(self, request: EngineRequest) -> int:
        """Return the sampling seed. Random numbers depend only on it and the token's position."""
        base = request.params.seed
        if base is None:
            return self._seeds.getrandbits(63)
        # The n outputs of a request need independent draws: space them by an odd 64-bit constant.
        return (base + request.index * 0x9E3779B97F4A7C15) & (2**63 - 1)

    def abort(self, ids: Iterable[str]) -> None:
        """End sequences by id. Unknown ids are ignored."""
        for sequence_id in ids:
            self._compiling.pop(sequence_id, None)
            self.scheduler.abort(sequence_id)

    @property
    def has_work(self) -> bool:
        scheduler = self.scheduler
        waits = self._compiling or scheduler.outbox
        return bool(waits) or scheduler.has_work or scheduler.in_flight > 0

    # -------------------------------------------------------------------------------- steps

    def step(self) -> list[TokenOutput]:
        """Launch the next step, get the oldest output, and return the new tokens."""
        began = time.perf_counter()
        outputs = self._compiled() if self._compiling else []
        plan = self.scheduler.plan()
        if self.scheduler.outbox:
            outputs += self.scheduler.outbox
            self.scheduler.outbox = []
        if plan is not None:
            self._executor.launch(plan)
        if plan is not None and plan.held:
            # Bitmasks depend on the previous step's tokens, so get its output first. The forward
            # pass of this step already runs meanwhile.
            if self.scheduler.in_flight > 1:
                outputs += self._collect()
            self._executor.sample(self._edits())
            if not self.facts.depth:
                outputs += self._collect()
        elif self.scheduler.in_flight > (self.facts.depth if plan is not None else 0):
            outputs += self._collect()
        self._step_seconds += time.perf_counter() - began
        for logger in self._loggers:
            logger.record(self.stats)
        return outputs

    def _collect(self) -> list[TokenOutput]:
        result = self._executor.collect()
        if result.error is not None:
            log.error("step %d failed: %s", result.id, result.error)
            self._executor.check()
        fault = result.error or next(iter(result.faults.values()), None)
        if fault is not None and self.host.switches.strict:
            raise EngineError(f"{fault} (plugin_strict makes it fatal)")
        self._steps += 1
        return self.scheduler.commit(result)

    def _edits(self) -> StepEdits | None:
        """Return the bitmasks of the newest step, or ``None`` if no row needs one."""
        rows = self.scheduler.guided_rows()
        return self._guided.masks(rows) if rows else None

    def _compiled(self) -> list[TokenOutput]:
        """Queue the sequences with a compiled grammar; return errors of failed compilations."""
        outputs = []
        if not self.scheduler.has_work:
            self._guided.wait(IDLE_SECONDS)
        for name, (sequence, ticket) in list(self._compiling.items()):
            try:
                guide = ticket.guide()
            except RequestError as error:
                message = TokenOutput(name, [], "error", error=str(error), param=error.param)
                outputs.append(message)
            except PluginLoadError as error:
                self._end_if_strict(error)
                log.error("request %s: %s", name, error)
                outputs.append(TokenOutput(name, [], "error", error=str(error)))
            else:
                if guide is None:
                    continue
                sequence.guide, sequence.held = guide, True
                self._queue(sequence)
            del self._compiling[name]
        return outputs

    def check(self) -> None:
        """Raise ``EngineDeadError`` if the executor has failed; count and log broken invariants."""
        self._executor.check()
        faults = self.scheduler.check_integrity()
        self._integrity_faults += len(faults)
        for fault in faults:
            log.error("integrity: %s", fault)

    @property
    def stats(self) -> EngineStats:
        scheduler, counters = self.scheduler, self.scheduler.counters
        return EngineStats(
            steps=self._steps,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + len(self._compiling),
            pages_total=sum(p.capacity for p in self._cache.pools),
            pages_used=sum(p.used for p in self._cache.pools),
            prompt_tokens=counters.prompt_tokens,
            generated_tokens=counters.generated_tokens,
            prefix_query_tokens=counters.prefix_queries,
            prefix_hit_tokens=counters.prefix_hits,
            preemptions=counters.preemptions,
            finished=dict(counters.finished),
            step_seconds=self._step_seconds,
            integrity_faults=self._integrity_faults,
            plugin_calls=self.host.call_stats.rows(),
            plugin_seconds=self.host.call_stats.seconds(),
            plugin_states=self.host.states(),
        )

    def close(self) -> None:
        """Release the device and the plugins. May be called twice."""
        if not self._closed:
            self._closed = True
            self._guided.close()
            self._stop()
            self.host.unconfigure()
