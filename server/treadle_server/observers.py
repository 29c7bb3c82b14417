"""What server plugins may learn of the prompts that the engine has answered: times, tokens, ends.

A plugin adds a function to ``ServerContext.observers`` in its lifespan, and removes it there. Nothing
is recorded while there is none.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import msgspec

from treadle.api.sampling_params import SamplingParams
from treadle.outputs import RequestMetrics, RequestOutput

if TYPE_CHECKING:
    from treadle_server.generation import Generation

__all__ = ("FinishedPrompt", "Observer", "Observers", "PromptRecord")

log = logging.getLogger("treadle.server")


class FinishedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt that the engine has answered, or that ended before its answer was complete.

    ``id`` is the id of the answer, the same for all prompts of one request. All times are in seconds
    of ``time.monotonic``. ``finish_reasons`` has one entry for each output, ``abort`` for those that
    the client, the deadline or the server ended. ``error`` is the type of the error that ended it.
    """

    id: str
    operation: Literal["chat", "text_completion"]
    model: str | None
    """The name that the client sent."""
    params: SamplingParams
    times: RequestMetrics
    end_time: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    finish_reasons: list[str]
    error: str | None = None


Observer = Callable[[FinishedPrompt], None]
"""Called on the event loop, in the context of the HTTP request: it must return at once."""


class Observers:
    """The observers of one server. One that raises is logged and not called again."""

    def __init__(self) -> None:
        self._observers: list[Observer] = []

    @property
    def is_empty(self) -> bool:
        return not self._observers

    def add(self, observer: Observer) -> None:
        self._observers.append(observer)

    def remove(self, observer: Observer) -> None:
        """Remove an observer, which may have been removed because it failed."""
        if observer in self._observers:
            self._observers.remove(observer)

    @contextmanager
    def recorded(self, generation: Generation) -> Iterator[PromptRecord | None]:
        """Yield what takes the outputs of a prompt, ``None`` if nobody observes. Tell the observers
        when the prompt ends, however it does."""
        if not self._observers:
            yield None
            return
        record, error = PromptRecord(generation), None
        try:
            yield record
        except BaseException as raised:
            is_failure = isinstance(raised, Exception)
            error = type(raised).__name__ if is_failure else None
            raise
        finally:
            self._notify(record.finished(error))

    def _notify(self, prompt: FinishedPrompt) -> None:
        for observer in list(self._observers):
            try:
                observer(prompt)
            except Exception:
                log.exception("an observer of requests failed and is not called again")
                self.remove(observer)


class PromptRecord:
    """The outputs of one prompt so far."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._is_delta = generation.params.output_kind == "delta"
        self._last: RequestOutput | None = None
        self._start_time = time.monotonic()
        self._num_output_tokens = 0
        self._num_cached_tokens = 0
        self._finish_reasons: dict[int, str] = {}

    def add(self, output: RequestOutput) -> None:
        """Count what the engine has returned."""
        self._last = output
        self._num_cached_tokens = max(self._num_cached_tokens, output.num_cached_tokens)
        count = 0
        for completion in output.outputs:
            count += len(completion.token_ids)
            if completion.finish_reason is not None:
                self._finish_reasons[completion.index] = completion.finish_reason
        self._num_output_tokens = self._num_output_tokens + count if self._is_delta else count

    def finished(self, error: str | None) -> FinishedPrompt:
        generation, last = self._generation, self._last
        reasons = [self._finish_reasons.get(i, "abort") for i in range(generation.params.n)]
        if error is not None:
            reasons = ["error"] * len(reasons)
        return FinishedPrompt(
            id=generation.id,
            operation="text_completion" if generation.chat is None else "chat",
            model=generation.request.model,
            params=generation.params,
            times=RequestMetrics(arrival_time=self._start_time) if last is None else last.metrics,
            end_time=time.monotonic(),
            num_prompt_tokens=0 if last is None else len(last.prompt_token_ids),
            num_cached_tokens=self._num_cached_tokens,
            num_output_tokens=self._num_output_tokens,
            finish_reasons=reasons,
            error=error,
        )
