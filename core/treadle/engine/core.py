"""The engine core: requests in, tokens out, one step at a time."""

from __future__ import annotations

import gc
import logging
import random
import time
from collections.abc import Iterable
from concurrent.futures import Future
from copy import copy
from dataclasses import fields

from treadle.api.kinds import EXECUTORS, LOGITS_PROCESSORS, SCHEDULING_POLICIES, STAT_LOGGERS
from treadle.api.requests import EngineRequest, TokenOutput
from treadle.api.stats import CacheStats, EngineStats
from treadle.api.step_types import EngineInfo
from treadle.cache import KVCacheManager
from treadle.config import EngineConfig
from treadle.engine.extensions import ConfiguredExtensions
from treadle.errors import EngineError, PluginLoadError, QueueFullError, RequestError, TreadleError
from treadle.loading.matching import choose_executor
from treadle.plugins import PluginManager
from treadle.processes.failure import strict_error
from treadle.scheduler.scheduler import Scheduler
from treadle.scheduler.sequence import SequenceState
from treadle.scheduler.step_pace import StepPace
from treadle.structured_output import StructuredOutputManager, StructuredOutputState
from treadle.structured_output.batch import GrammarBatch
from treadle.text.request_checks import check_request

__all__ = ("EngineCore",)

log = logging.getLogger(__name__)

# How long a step may wait for a grammar if no sequence can run.
IDLE_SECONDS = 0.02
# Python 3.12 itself begins with 375 frozen objects; whoever freezes some has imported more.
FEW_FROZEN = 1000
# By device: the default of max_step_ms, and the prompt tokens that it is believed to suffice for.
STEP_BOUNDS = {"cpu": (250.0, 16), "cuda": (40.0, 2048)}


class EngineCore:
    """Scheduler, executor and structured output, driven by ``step``. Use it from one thread.

    On CUDA (``num_async_steps`` is 1) one step is in flight while the CPU side processes the
    previous output and schedules the next step. On a CPU each step ends before ``step`` returns.
    """

    def __init__(self, config: EngineConfig, plugins: PluginManager) -> None:
        self.config = config
        self.plugins = plugins
        self._extensions = ConfiguredExtensions(plugins, config)
        try:
            self._start()
        except BaseException:
            self._extensions.unconfigure()
            raise
        self._structured_output = StructuredOutputManager(config, plugins, self.info)
        self._waiting_for_grammar: dict[
            str, tuple[SequenceState, Future[StructuredOutputState]]
        ] = {}
        self._seeds = random.Random(config.model.seed)
        self._steps = 0
        self._step_seconds = 0.0
        self._integrity_faults = 0
        self._compilations = 0
        self._deferred: GrammarBatch | None = None  # of the newest step, if it waits for bitmasks
        self._closed = False
        # To look at what the start has made takes as long as many steps. Others may have had their reasons.
        self._has_frozen = gc.get_freeze_count() < FEW_FROZEN
        if self._has_frozen:
            gc.freeze()

    def _start(self) -> None:
        config, plugins = self.config, self.plugins
        # What needs no model comes first: a wrong option of a plugin is reported before it loads.
        policy = plugins.create_guarded(SCHEDULING_POLICIES, config.scheduler.scheduling_policy)
        names = config.plugins.stat_loggers
        self._loggers = [plugins.create_guarded(STAT_LOGGERS, name) for name in names]
        name = choose_executor(config.device, plugins)
        self._executor = plugins.create_guarded(EXECUTORS, name, config=config, plugins=plugins)
        try:
            self.info: EngineInfo = self._executor.start()
            self._cache = KVCacheManager(
                self.info.kv_cache_groups,
                self.info.page_size,
                prefix_caching=config.cache.enable_prefix_caching,
            )
            # These instances only validate requests. The model runner has its own, to edit logits.
            names = config.plugins.logits_processors
            self._processors = {
                name: plugins.create_guarded(
                    LOGITS_PROCESSORS, name, vocab_size=self.info.vocab_size
                )
                for name in names
            }
        except BaseException:
            self._abort()
            raise
        default_ms, chunk = STEP_BOUNDS["cuda" if self.info.device.startswith("cuda") else "cpu"]
        step_ms = config.scheduler.max_step_ms
        max_seconds = (default_ms if step_ms is None else step_ms) / 1e3
        pace = StepPace(max_seconds, chunk, self.info.max_graph_tokens)
        eos_ids = self.info.eos_token_ids
        self.scheduler = Scheduler(config.scheduler, self._cache, policy, eos_ids, pace)

    def _abort(self) -> None:
        """Stop the executor. Only log its errors, since the plugins must be released afterwards."""
        try:
            self._executor.shutdown()
        except TreadleError as error:
            log.error("%s", error, exc_info=error)

    def add_request(self, request: EngineRequest, *, is_checked: bool = False) -> None:
        """Queue a request. Raises as ``validate`` does, and ``QueueFullError`` if too many wait."""
        self.validate(request, is_checked=is_checked)
        if request.id in self.scheduler.sequences or request.id in self._waiting_for_grammar:
            raise RequestError(f"request id {request.id!r} is in use", param="request_id")
        waiting = len(self.scheduler.waiting) + len(self._waiting_for_grammar)
        if waiting >= self.config.scheduler.max_num_queued_reqs:
            raise QueueFullError(
                f"{waiting} requests are waiting; max_num_queued_reqs allows "
                f"{self.config.scheduler.max_num_queued_reqs}; try again later"
            )
        root = self._cache.page_hasher.root_hash(request.params.cache_salt)
        sequence = SequenceState(request, self.info, root, self._seed(request))
        sequence.defer_sampling = not self._processors.keys().isdisjoint(sequence.extra_args)
        if request.params.structured_outputs is None:
            self._queue(sequence)
        else:
            ready = self._structured_output.submit(request)
            self._waiting_for_grammar[request.id] = sequence, ready

    def _queue(self, sequence: SequenceState) -> None:
        """Add a sequence to the scheduler. If the policy fails, only this request fails."""
        try:
            self.scheduler.add(sequence)
        except EngineError as error:
            if self.plugins.switches.strict:
                raise
            log.error("request %s: %s", sequence.request.label, error)
            failed = TokenOutput(sequence.id, [], "error", error=str(error))
            self.scheduler.pending_outputs.append(failed)

    def validate(self, request: EngineRequest, *, is_checked: bool = False) -> None:
        """Raise ``RequestError`` or ``PluginLoadError``. ``is_checked`` if ``check_request`` was called."""
        if not is_checked:
            check_request(request, self.info)
        if request.params.structured_outputs is not None:
            self._structured_output.validate(request.params.structured_outputs)
        for name, arguments in (request.params.extra_args or {}).items():
            if name not in self._processors:
                if name == self.config.scheduler.scheduling_policy:
                    continue
                raise RequestError(
                    f"extra_args names {name!r}, which is neither a logits processor of this engine "
                    f"(logits_processors: {', '.join(self._processors) or 'none'}) nor its policy",
                    param="extra_args",
                )
            try:
                self._processors[name].validate_params(arguments)
            except PluginLoadError as error:
                log.warning("%s", error, exc_info=error.__cause__)
                raise

    def _seed(self, request: EngineRequest) -> int:
        """Return the sampling seed. Random numbers depend only on it and the token's position."""
        base = request.params.seed
        if base is None:
            return self._seeds.getrandbits(63)
        # The n outputs of a request need independent draws: space them by an odd 64-bit constant.
        return (base + request.index * 0x9E3779B97F4A7C15) & (2**63 - 1)

    def abort_requests(self, ids: Iterable[str]) -> None:
        """End sequences by id. Unknown ids are ignored."""
        for sequence_id in ids:
            if waiting := self._waiting_for_grammar.pop(sequence_id, None):
                waiting[1].cancel()
            self.scheduler.abort(sequence_id)

    @property
    def has_work(self) -> bool:
        pending = self._waiting_for_grammar or self.scheduler.pending_outputs
        return bool(pending) or self.scheduler.has_work or self.scheduler.in_flight > 0

    def step(self) -> list[TokenOutput]:
        """Launch the next step, get the oldest output, and return the new tokens."""
        start_time = time.perf_counter()
        outputs = self._admit_compiled() if self._waiting_for_grammar else []
        scheduler_output = self.scheduler.schedule()
        outputs += self.scheduler.pending_outputs
        self.scheduler.pending_outputs = []
        self._sample_deferred()
        if scheduler_output is not None:
            self._executor.execute_model(scheduler_output)
        # Bitmasks depend on the tokens of the step before: its output comes first, while this step's forward pass runs.
        is_deferred = scheduler_output is not None and scheduler_output.defer_sampling
        num_async = self.info.num_async_steps if scheduler_output is not None else 0
        if self.scheduler.in_flight > max(num_async, is_deferred):
            outputs += self._get_output()
        if is_deferred:
            self._deferred = self.scheduler.grammars()
            if not num_async:
                self._sample_deferred()
                outputs += self._get_output()
        self._step_seconds += time.perf_counter() - start_time
        for logger in self._loggers:
            logger.record(self.stats)
        return outputs

    def _sample_deferred(self) -> None:
        if self._deferred is not None:
            masks = self._structured_output.bitmasks(self._deferred)
            self._deferred = None
            self._executor.sample_tokens(masks)

    def _get_output(self) -> list[TokenOutput]:
        result = self._executor.get_output()
        if result.error is not None:
            log.error("step %d failed: %s", result.id, result.error)
            self._executor.check_health()
        fault = result.error or next(iter(result.row_errors.values()), None)
        if fault is not None and self.plugins.switches.strict:
            raise strict_error(fault)
        self._steps += 1
        self._compilations = max(self._compilations, result.compilations)
        return self.scheduler.update_from_output(result)

    def _admit_compiled(self) -> list[TokenOutput]:
        """Queue the sequences with a compiled grammar; return errors of failed compilations."""
        outputs = []
        if not self.scheduler.has_work:
            self._structured_output.wait(IDLE_SECONDS)
        for name, (sequence, future) in list(self._waiting_for_grammar.items()):
            if not future.done():
                continue
            try:
                state = future.result()
            except RequestError as error:
                outputs.append(TokenOutput(name, [], "error", error=str(error), param=error.param))
            except PluginLoadError as error:
                if self.plugins.switches.strict:
                    raise strict_error(error) from error
                log.error("request %s: %s", sequence.request.label, error)
                outputs.append(TokenOutput(name, [], "error", error=str(error)))
            else:
                sequence.grammar_state, sequence.defer_sampling = state, True
                if sequence.params.allowed_token_ids is not None or sequence.request.bad_words:
                    ids = sequence.stop_token_ids, sequence.forbidden_ids()
                    state.check_first_token(self.info.vocab_size, *ids)
                if state.error is None:
                    self._queue(sequence)
                else:
                    outputs.append(
                        TokenOutput(name, [], "error", error=state.error, param=state.error_param)
                    )
            del self._waiting_for_grammar[name]
        return outputs

    def check_health(self) -> None:
        """Raise ``EngineDeadError`` if the executor has failed; count and log broken invariants."""
        self._executor.check_health()
        faults = self.scheduler.check_integrity()
        self._integrity_faults += len(faults)
        for fault in faults:
            log.error("integrity: %s", fault)

    @property
    def stats(self) -> EngineStats:
        scheduler, counters, pools = self.scheduler, self.scheduler.counters, self._cache.pools
        totals = {f.name: copy(getattr(counters, f.name)) for f in fields(counters)}
        num_pages = sum(p.capacity for p in pools)
        return EngineStats(
            num_steps=self._steps,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + len(self._waiting_for_grammar),
            num_pages=num_pages,
            num_used_pages=sum(p.num_used for p in pools),
            **totals,
            step_seconds=self._step_seconds,
            integrity_faults=self._integrity_faults,
            compilations_in_service=self._compilations,
            num_grammars_waiting=self._structured_output.queue.num_pending,
            grammars_compiled=self._structured_output.queue.num_compiled,
            grammars_failed=self._structured_output.queue.num_failed,
            grammars_rejected=self._structured_output.queue.num_rejected,
            plugin_calls=self.plugins.call_stats.rows(),
            plugin_seconds=self.plugins.call_stats.seconds(),
            plugin_states=self.plugins.states(),
            caches={
                "grammars": self._structured_output.queue.cache_stats,
                "prefix_pages": CacheStats(sum(p.num_cached for p in pools), num_pages),
            },
        )

    def close(self) -> None:
        """Release the device and the plugins. May be called twice."""
        if not self._closed:
            self._closed = True
            self._structured_output.close()
            if self._has_frozen:
                gc.unfreeze()  # an executor collects what holds the device's memory
            self._abort()
            self._extensions.unconfigure()
