"""The engine: requests in, tokens out, one step at a time."""

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

# How long a step may wait for a grammar when there is nothing else to do.
IDLE_SECONDS = 0.02


class EngineCore:
    """Scheduler and executor in one loop. Used from one thread, without text.

    On CUDA one step is always in flight while the host commits the one before and plans the next
    (``facts.depth`` 1); on a CPU each step is collected at once.
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
            # These only check requests; those that edit logits live beside the model.
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
        """Stop the executor. If that fails, the plugins must be released nevertheless."""
        try:
            self._executor.stop()
        except TreadleError as error:
            log.error("%s", error, exc_info=error)

    # ----------------------------------------------------------------------------- requests

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises ``RequestError``, ``QueueFullError``, or ``PluginLoadError`` for
        what is not the client's fault; nothing else changes."""
        self.validate(request)
        if request.id in self.scheduler.live or request.id in self._compiling:
            raise RequestError(f"request id {request.id!r} is in use", param="request_id")
        waiting = len(self.scheduler.waiting) + len(self._compiling)
        if waiting >= self.config.scheduler.max_queue:
            raise QueueFullError(
                f"{waiting} requests are waiting, max_queue allows "
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
        """Hand a sequence to the scheduler; a policy that fails costs this request alone."""
        try:
            self.scheduler.add(sequence)
        except EngineError as error:
            if self.host.switches.strict:
                raise
            log.error("request %s: %s", sequence.id, error)
            failed = TokenOutput(sequence.id, [], "error", error=str(error))
            self.scheduler.outbox.append(failed)

    def validate(self, request: EngineRequest) -> None:
        """Raise ``RequestError`` for what could never be served; the engine is not changed."""
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
        """A processor that fails on its arguments costs the request that brought them."""
        try:
            self._processors[name].check(arguments)
        except PluginLoadError as error:
            log.warning("%s", error, exc_info=error.__cause__)
            raise

    def _end_if_strict(self, error: TreadleError) -> None:
        if self.host.switches.strict:
            raise EngineError(f"{error} (plugin_strict makes it fatal)") from error

    def _seed(self, request: EngineRequest) -> int:
        """A sequence's random numbers depend on this and the position only."""
        base = request.params.seed
        if base is None:
            return self._seeds.getrandbits(63)
        # Siblings of one request draw independently: spread them by an odd 64-bit constant.
        return (base + request.index * 0x9E3779B97F4A7C15) & (2**63 - 1)

    def abort(self, ids: Iterable[str]) -> None:
        """End requests now, wherever they are; unknown ids are ignored."""
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
        """Launch the next step, collect the oldest; return what sequences gained."""
        began = time.perf_counter()
        outputs = self._compiled() if self._compiling else []
        plan = self.scheduler.plan()
        if self.scheduler.outbox:
            outputs += self.scheduler.outbox
            self.scheduler.outbox = []
        if plan is not None:
            self._executor.launch(plan)
        if plan is not None and plan.held:
            # The step before must be known for this one's masks: its device work overlaps.
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
        """The token bitmasks of the step that was launched last."""
        rows = self.scheduler.guided_rows()
        return self._guided.masks(rows) if rows else None

    def _compiled(self) -> list[TokenOutput]:
        """Queue the sequences whose grammar is ready; refuse those whose grammar is wrong."""
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
        """Called when idle. Raises ``EngineDeadError`` if the executor is lost; counts and logs
        violated invariants, which are never a reason to stop."""
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
