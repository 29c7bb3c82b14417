"""Grammars wait to be compiled: the quick ones first, each client fairly, and not too many."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import monotonic

from treadle.api.stats import CacheStats
from treadle.api.structured_output import GrammarSpec
from treadle.errors import PluginLoadError, QueueFullError
from treadle.processes.fair_queue import FairQueue
from treadle.processes.isolated import ProcessExit
from treadle.structured_output.checker import CPU_SECONDS, TooSlow
from treadle.structured_output.compilers import Compilers, SizedGrammar
from treadle.structured_output.spec import MAX_SCHEMA

__all__ = ("CompileJob", "CompileQueue")

log = logging.getLogger("treadle.structured_output")

# Bounds of the compiled grammars that are kept. Failures are kept too, so that a bad grammar costs
# its limits once.
MAX_GRAMMARS = 256
MAX_GRAMMAR_BYTES = 1 << 30
MAX_KNOWN_TIMES = 4096
QUICK_SECONDS = 0.2
"""CPU time after which a grammar makes way for others, to be compiled anew among the slow ones."""
SHARE = 0.25
"""Seconds of a thread that a client is forgiven each second."""

Key = tuple[str, ...]


class CompileJob(Future[SizedGrammar]):
    """One grammar that is compiled for all who want it. It is cancelled if they all leave.

    ``cost`` is the CPU time that it is expected to take.
    """

    def __init__(
        self, key: Key, spec: GrammarSpec, backends: Sequence[str], client: str, cost: float
    ) -> None:
        super().__init__()
        self.key, self.spec, self.backends = key, spec, backends
        self.client, self.cost = client, cost
        self.num_waiting = 0

    @property
    def size(self) -> int:
        """Bytes that its grammar keeps; 0 if there is none."""
        failed = not self.done() or self.cancelled() or self.exception() is not None
        return 0 if failed else self.result().size

    @property
    def is_retryable(self) -> bool:
        """Whether it was left, or failed because of a busy machine, of others or of a plugin, and
        may be better next time."""
        if not self.done() or self.cancelled():
            return self.done()
        error = self.exception()
        cause = None if error is None else error.__cause__
        return (
            isinstance(error, PluginLoadError)
            or isinstance(cause, TimeoutError)
            or (isinstance(cause, ProcessExit) and cause.was_killed)
        )


class _Lane:
    """Jobs that are run one after another. The thread starts with the first one."""

    def __init__(self, name: str) -> None:
        self.queue: FairQueue[CompileJob] = FairQueue(SHARE)
        self.threads = ThreadPoolExecutor(1, thread_name_prefix=f"treadle-grammar-{name}")


class CompileQueue:
    """Compiles grammars, and keeps them in ``jobs``.

    Each backend has a thread for grammars that are quick, as all are taken to be until they have
    been seen. One more thread is for those that were not: they do not hold up others. ``submit``
    and ``release`` are called by one thread.
    """

    def __init__(self, compilers: Compilers, max_pending: int) -> None:
        self._compilers, self._max_pending = compilers, max_pending
        self.jobs: OrderedDict[Key, CompileJob] = OrderedDict()
        self._seconds: OrderedDict[Key, float] = OrderedDict()
        self._quick: dict[str, _Lane] = {}
        self._slow = _Lane("slow")
        self._lock = threading.Lock()  # of lanes and times
        self.num_compiled = self.num_failed = self.num_rejected = 0

    @property
    def num_pending(self) -> int:
        """Grammars that nobody compiles yet."""
        return sum(len(lane.queue) for lane in self._lanes())

    @property
    def cache_stats(self) -> CacheStats:
        """The grammars that are kept, with the bytes that their compilation took."""
        total = sum(job.size for job in self.jobs.values())
        return CacheStats(len(self.jobs), MAX_GRAMMARS, total, MAX_GRAMMAR_BYTES)

    def warm(self, backend: str) -> None:
        """Make a backend ready before its first grammar."""
        self._quick_lane(backend).threads.submit(self._warm, backend)

    def submit(self, spec: GrammarSpec, backends: Sequence[str], client: str) -> CompileJob:
        """Order a grammar, for one more who waits. Raises ``QueueFullError``."""
        key = (*backends, spec.kind, spec.source, repr(sorted(spec.options.items())))
        with self._lock:
            job = self.jobs.get(key)
            if job is None or job.is_retryable:
                self._check_room(client)
                cost = self._seconds.get(key, QUICK_SECONDS * len(spec.source) / MAX_SCHEMA)
                job = self.jobs[key] = CompileJob(key, spec, backends, client, cost)
                quick = self._quick_lane(backends[0])
                self._push(self._slow if cost > QUICK_SECONDS else quick, job)
            job.num_waiting += 1
        self.jobs.move_to_end(key)
        self._evict()
        return job

    def release(self, job: CompileJob) -> None:
        """One who waits for ``job`` has left. If it was the last, it is not begun any more."""
        with self._lock:
            job.num_waiting -= 1
            if not job.num_waiting and any(lane.queue.discard(job) for lane in self._lanes()):
                job.cancel()

    def forget(self, job: CompileJob) -> None:
        """Its grammar has failed: the next request compiles it afresh."""
        if self.jobs.get(job.key) is job:
            del self.jobs[job.key]

    def close(self) -> None:
        """Leave what is being compiled to itself. May be called twice."""
        for lane in self._lanes():
            lane.threads.shutdown(wait=False, cancel_futures=True)
        self._compilers.close()
        self.jobs.clear()  # what they have started ends with them

    def _lanes(self) -> list[_Lane]:
        return [self._slow, *self._quick.values()]

    def _quick_lane(self, backend: str) -> _Lane:
        if backend not in self._quick:
            self._quick[backend] = _Lane(backend)
        return self._quick[backend]

    def _check_room(self, client: str) -> None:
        """Raise ``QueueFullError`` if too many grammars wait, or half of as many of one client."""
        pending = [job.client for lane in self._lanes() for job in lane.queue]
        num_own = pending.count(client) if client else 0
        if len(pending) < self._max_pending and num_own < -(-self._max_pending // 2):
            return
        self.num_rejected += 1
        raise QueueFullError(
            f"{len(pending)} grammars wait to be compiled, {num_own} of them of this client; "
            f"max_num_queued_grammars allows {self._max_pending}, half of them for one client: "
            "try again later"
        )

    def _push(self, lane: _Lane, job: CompileJob) -> None:
        lane.queue.push(job)
        with contextlib.suppress(RuntimeError):  # it was closed meanwhile
            lane.threads.submit(self._run_next, lane)

    def _evict(self) -> None:
        """Forget the grammars that were used longest ago, as far as there are too many."""
        sizes = [job.size for job in self.jobs.values()]
        count, total = len(sizes), sum(sizes)
        for size in sizes[:-1]:
            if count <= MAX_GRAMMARS and total <= MAX_GRAMMAR_BYTES:
                return
            self.jobs.popitem(last=False)
            count, total = count - 1, total - size

    def _run_next(self, lane: _Lane) -> None:
        limit = CPU_SECONDS if lane is self._slow else QUICK_SECONDS
        with self._lock:
            job = lane.queue.pop()
            if job is None:  # its last client has left
                return
            lane.queue.charge(job.client, limit - job.cost)  # what it may cost, until it is known
        start_time = monotonic()
        try:
            grammar = self._compilers.compile(job.spec, job.backends, limit)
        except TooSlow:
            with self._lock:
                job.cost = CPU_SECONDS
                if job.num_waiting:
                    self._push(self._slow, job)
                else:
                    job.cancel()
        except BaseException as error:  # a panic of a Rust library is no Exception
            self.num_failed += 1
            self._learn(job.key, limit if isinstance(error.__cause__, ProcessExit) else 0.0)
            job.set_exception(error)
        else:
            self.num_compiled += 1
            self._learn(job.key, grammar.seconds)
            job.set_result(grammar)
        with self._lock:
            lane.queue.charge(job.client, monotonic() - start_time - limit)

    def _learn(self, key: Key, seconds: float) -> None:
        with self._lock:
            self._seconds[key] = seconds
            self._seconds.move_to_end(key)
            if len(self._seconds) > MAX_KNOWN_TIMES:
                self._seconds.popitem(last=False)

    def _warm(self, backend: str) -> None:
        try:
            self._compilers.warm(backend)
        except Exception as error:  # each of its requests will fail; the log says so at once
            log.error("%s", error, exc_info=error)
