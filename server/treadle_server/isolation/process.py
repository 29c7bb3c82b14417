"""The process of one isolated plugin, as the server sees it: calls with limits, and a breaker."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any

import msgspec

from treadle.processes.failure import Failure
from treadle.processes.isolated import IsolatedProcess
from treadle.processes.watchdog import MAX_STUCK_THREADS, RETRY_SECONDS
from treadle_server.isolation.wire import POLL, Call, Hello, Kept, Reply, decode, encode, pack

__all__ = (
    "GRAMMAR_MEMORY",
    "MEMORY",
    "ObjectLost",
    "PluginProcess",
    "ProcessLost",
    "ask_tokenizer",
)

log = logging.getLogger("treadle.plugins")

MEMORY = 1 << 30
"""Bytes by which the process of a plugin may grow from where it is before it imports the plugin."""
GRAMMAR_MEMORY = 4 << 30
"""The same for grammars, of which the core keeps 1 GiB. Each thread of a library reserves some, too."""
MAX_FAILURES = MAX_STUCK_THREADS
"""Processes lost in a row after which one call in ``RETRY_SECONDS`` is made."""
ENTRY = "treadle_server.isolation.child:main"
NO_ANSWER = "its process did not answer within {:g} s and was ended"
PAUSE = 0.002
"""Seconds between the polls of a call beside others, in which these may begin."""
LOST = "its process was ended during another call, and its state is lost"


class ProcessLost(RuntimeError):
    """The process has died during the call, or was lost too often to be called."""


class ObjectLost(RuntimeError):
    """The object of the call was built by a process that is gone. Nothing was called."""


class PluginProcess:
    """One child, started by the first call and again after its end. Thread-safe: calls wait for
    each other.

    ``generation`` counts the children; what an earlier one has built is gone.
    """

    def __init__(self, name: str, hello: Hello, clock: Callable[[], float] = monotonic) -> None:
        self.name = name
        self.generation = 0
        self._process = IsolatedProcess(ENTRY, encode(hello))
        self._pid: int | None = None
        self._lock = threading.Lock()
        self._clock = clock
        self._num_failures = 0
        self._retry_time = 0.0
        # Finalizers append to it, in any thread.
        self._freed: deque[int] = deque()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def close(self) -> None:
        """End the child. The next call starts another one."""
        self._process.close()

    def call(
        self, call: Call, seconds: float, tokenizer: object = None, generation: int = 0
    ) -> tuple[Any, int]:
        """Return the result of a call in the child, and the number of the child that answered.

        ``generation`` is the number of the child that has built the object; 0 for any.

        Raises what the plugin raised: a ``TreadleError`` as it is, any other exception as one of the
        same name. Raises ``ObjectLost``, and ``ProcessLost`` and ``TimeoutError``, after which the
        next call gets a new child.
        """
        deadline = monotonic() + seconds
        origins = {generation, *(a.generation for a in call.arguments if isinstance(a, Kept))} - {0}
        call.arguments = pack(call.arguments, tokenizer=tokenizer)
        call.named = pack(call.named, tokenizer=tokenizer)
        if {g for g in origins if g < self.generation}:
            raise ObjectLost(LOST)  # without waiting for those who use the new process
        if not self._lock.acquire(timeout=seconds):
            raise TimeoutError(f"its process has been busy for {seconds:g} s")
        try:
            if refusal := self.refusal:
                raise ProcessLost(refusal)
            if origins - {self.generation}:
                raise ObjectLost(LOST)
            try:
                reply = self._exchange(call, deadline, tokenizer)
            except TimeoutError:
                self._lose()
                raise TimeoutError(NO_ANSWER.format(seconds)) from None
            except Exception as error:  # the child sends what it likes
                self._lose()
                raise ProcessLost(f"its process was lost: {error}") from error
            # A hook that returns does not show that its object works, and a call that goes on nothing.
            if call.target and not call.beside:
                self._num_failures = 0
            generation = self.generation
        finally:
            self._lock.release()
        if reply.error == ObjectLost.__name__:
            raise ObjectLost(LOST)
        if reply.error:
            name = reply.error if reply.error.isidentifier() else "RuntimeError"
            text = "" if reply.failure is None else reply.failure.message
            raise type(name[:80], (RuntimeError,), {})(text)
        if reply.failure is not None:
            raise reply.failure.error()
        return reply.value, generation

    def call_beside(
        self, call: Call, seconds: float, tokenizer: object = None, generation: int = 0
    ) -> tuple[Any, int]:
        """Make a call for which others need not wait: of a method that is safe in threads."""
        deadline = monotonic() + seconds
        call.beside, has_target = True, bool(call.target)
        (number, result), generation = self.call(call, seconds, tokenizer, generation)
        while number:
            sleep(PAUSE)
            poll = Call(number, POLL, beside=True)
            (number, result), _ = self.call(poll, seconds, tokenizer, generation)
            if number and monotonic() > deadline:
                with self._lock:
                    if self.generation == generation:
                        self._lose()
                raise TimeoutError(NO_ANSWER.format(seconds))
        if has_target:
            self._num_failures = 0
        return result, generation

    def free(self, number: int, generation: int) -> None:
        """Tell the child with the next call that an object is not needed any more."""
        if generation == self.generation:
            self._freed.append(number)

    def _exchange(self, call: Call, deadline: float, tokenizer: object) -> Reply:
        """Send a call and answer the calls of the tokenizer that come before its reply."""
        call.freed = [self._freed.popleft() for _ in range(len(self._freed))]
        message: msgspec.Struct = call
        while True:
            data = self._process.request(encode(message), max(deadline - monotonic(), 0.001))
            if self._process.pid != self._pid:
                self._pid = self._process.pid
                self.generation += 1
            reply: Reply = decode(data, Reply, kept=self._kept)
            if reply.callback is None:
                return reply
            try:
                message = Reply(pack(ask_tokenizer(tokenizer, reply.callback)))
            except Exception as error:  # the plugin asked for it, and hears of it
                message = Reply(failure=Failure.of(error))

    def _kept(self, number: int, text: str) -> Kept:
        kept = Kept(text)
        kept.number, kept.generation = number, self.generation
        weakref.finalize(kept, self.free, number, self.generation).atexit = False
        return kept

    def _lose(self) -> None:
        self._process.close()
        self._pid = None
        self.generation += 1
        self._freed.clear()
        self._num_failures += 1
        if self._num_failures >= MAX_FAILURES:
            self._retry_time = self._clock() + RETRY_SECONDS
            log.error(
                "%s has lost its process %d times in a row and is not called for %g s",
                self.name,
                self._num_failures,
                RETRY_SECONDS,
            )

    @property
    def refusal(self) -> str:
        """Why no call is made at the moment; empty if calls are made."""
        seconds = self._retry_time - self._clock()
        if self._num_failures < MAX_FAILURES or seconds <= 0:
            return ""
        lost = f"its process was lost {self._num_failures} times in a row"
        return f"{lost}; it is called again in {seconds:.0f} s"


def ask_tokenizer(tokenizer: Any, call: Call) -> Any:
    """Return what a tokenizer says. Only its protocol, and data beside it, may be asked for."""
    from treadle_server.isolation.child import TOKEN_PAGE, TOKENIZER_DATA, TOKENIZER_METHODS

    if tokenizer is not None and call.method == TOKEN_PAGE:
        first, count = call.arguments
        ids = range(first, min(first + count, tokenizer.vocab_size))
        return [tokenizer.token_bytes(i) for i in ids]
    if tokenizer is None or call.method not in (*TOKENIZER_METHODS, *TOKENIZER_DATA):
        raise ValueError(f"it asked for {call.method!r:.80} of the tokenizer")
    if call.read:
        return getattr(tokenizer, call.method, None)
    return getattr(tokenizer, call.method)(*call.arguments, **call.named)
