"""Turns what the engine says (ids) into what users see (``RequestOutput``)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import msgspec

from treadle.api.requests import EngineRequest, TokenOutput
from treadle.api.sampling_params import SamplingParams
from treadle.errors import PluginLoadError, RequestError
from treadle.outputs import PositionLogprobs, RequestMetrics, RequestOutput
from treadle.text.completion import CompletionState
from treadle.text.logprobs import LogprobText
from treadle.text.stops import StopStrings

if TYPE_CHECKING:
    from treadle.api.files import Tokenizer

__all__ = ("OutputProcessor", "PreparedRequest", "Sink", "merge_deltas")

Sink = Callable[[RequestOutput], None]
log = logging.getLogger("treadle.text")


class PreparedRequest(msgspec.Struct, frozen=True):
    """A checked request: what the engine gets (``sequences``) and what the frontend keeps of it.

    ``id`` is the user's label; the ids of ``sequences`` are ours.
    """

    id: str
    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    arrival_time: float
    sequences: list[EngineRequest]


class RequestState:
    """A request whose outputs are not finished."""

    def __init__(
        self, request: PreparedRequest, completions: list[CompletionState], sink: Sink
    ) -> None:
        self.request = request
        self.sink = sink
        self.completions = completions
        self.num_unfinished = len(completions)
        self.num_cached_tokens = 0
        self.unenforced: str | None = None
        self.prompt_logprobs: list[PositionLogprobs | None] | None = None
        self.metrics = RequestMetrics(arrival_time=request.arrival_time)

    def emit(self, changed: list[CompletionState]) -> None:
        kind = self.request.params.output_kind
        finished = self.num_unfinished == 0
        if kind == "final" and not finished:
            return
        completions = changed if kind == "delta" else self.completions
        prompt_logprobs = self.prompt_logprobs
        if kind == "delta":
            self.prompt_logprobs = None  # said once
        self.sink(
            RequestOutput(
                request_id=self.request.id,
                prompt=self.request.prompt,
                prompt_token_ids=self.request.prompt_ids,
                outputs=[completion.take() for completion in completions],
                prompt_logprobs=prompt_logprobs,
                finished=finished,
                num_cached_tokens=self.num_cached_tokens,
                unenforced=self.unenforced,
                metrics=msgspec.structs.replace(self.metrics),
            )
        )


class OutputProcessor:
    """Owns every unfinished request of one frontend. Used by one thread.

    Each request has a ``sink`` that receives its outputs in order; the last one is ``finished``.
    """

    def __init__(self, tokenizer: Tokenizer | None, eos_ids: Iterable[int] = ()) -> None:
        """Without a tokenizer all texts are empty."""
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset(eos_ids)
        self._requests: dict[str, RequestState] = {}
        self._sequences: dict[str, tuple[RequestState, CompletionState]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: PreparedRequest, sink: Sink) -> None:
        """Expect outputs of ``request``. Raises ``RequestError`` if its id is in use."""
        if request.id in self._requests:
            raise RequestError(
                f"request_id {request.id!r} belongs to a request that is still running; choose "
                "another or leave it out",
                param="request_id",
            )
        params = request.params
        stops = StopStrings(params.stop_strings) if params.stop_strings else None
        stop_ids = self._eos_token_ids.union(params.stop_token_ids or ())
        completions = [
            CompletionState(
                s.id, s.index, params, request.prompt_ids, self._tokenizer, stops, stop_ids
            )
            for s in request.sequences
        ]
        state = RequestState(request, completions, sink)
        self._requests[request.id] = state
        for completion in completions:
            self._sequences[completion.id] = (state, completion)

    def process(self, outputs: Iterable[TokenOutput]) -> list[str]:
        """Deliver one step. Returns the ids of sequences that the engine should abort.

        What comes for a sequence that has ended here is ignored. A failure that belongs to one
        request ends that request alone.
        """
        now = time.monotonic()
        aborts: list[str] = []
        groups: dict[str, tuple[RequestState, list[CompletionState]]] = {}
        for out in outputs:
            entry = self._sequences.get(out.id)
            if entry is None:
                continue
            state, completion = entry
            try:
                self._push(state, completion, out, now)
            except Exception as error:  # of a tokenizer: it is this request's affair
                _fail(state, completion, error)
            if completion.stopped:
                aborts.append(completion.id)
            if completion.finish_reason is not None:
                self._remove(state, completion)
            elif state.request.params.output_kind == "final":
                continue
            changed = groups.setdefault(state.request.id, (state, []))[1]
            if completion not in changed:
                changed.append(completion)
        for state, changed in groups.values():
            state.emit(changed)
        return aborts

    def abort(self, request_id: str, reason: str = "abort", error: str | None = None) -> list[str]:
        """End a request now; its sink gets a last output. Returns the ids to abort in the engine.

        An unknown id is not an error: the request may have finished meanwhile.
        """
        state = self._requests.get(request_id)
        if state is None:
            return []
        changed = [c for c in state.completions if c.finish_reason is None]
        for completion in changed:
            try:
                completion.end(reason, error)
            except Exception as failure:
                _fail(state, completion, failure)
            self._remove(state, completion)
        state.emit(changed)
        return [completion.id for completion in changed]

    def drop(self, request_id: str) -> list[str]:
        """Forget a request without a last output. Returns the ids to abort in the engine."""
        state = self._requests.pop(request_id, None)
        if state is None:
            return []
        return [c.id for c in state.completions if self._sequences.pop(c.id, None) is not None]

    def request_of(self, sequence_id: str) -> str | None:
        """The user's id of the request that a sequence belongs to."""
        entry = self._sequences.get(sequence_id)
        return None if entry is None else entry[0].request.id

    def refusal(self, output: TokenOutput) -> RequestError | None:
        """Return the error of a request whose parameter failed before its first token, if it did."""
        entry = self._sequences.get(output.id)
        if output.param is None or entry is None or entry[1].num_tokens:
            return None
        return RequestError(output.error or "the request was rejected", param=output.param)

    def _push(
        self, state: RequestState, completion: CompletionState, out: TokenOutput, now: float
    ) -> None:
        if out.prompt_logprobs is not None and state.prompt_logprobs is None:
            logprob_text = LogprobText(self._tokenizer if state.request.params.detokenize else None)
            logprob_text.skip(state.request.prompt_ids[0])
            state.prompt_logprobs = [None, *map(logprob_text.position, out.prompt_logprobs)]
        if out.token_ids:
            if state.metrics.first_token_time is None:
                state.metrics.first_token_time = now
                state.metrics.scheduled_time = out.scheduled_time
            state.metrics.last_token_time = now
        if out.cached_tokens and not completion.index:
            state.num_cached_tokens = out.cached_tokens
        state.unenforced = state.unenforced or out.unenforced
        completion.push(out)

    def _remove(self, state: RequestState, completion: CompletionState) -> None:
        if self._sequences.pop(completion.id, None) is not None:
            state.num_unfinished -= 1
            if state.num_unfinished == 0:
                del self._requests[state.request.id]


def _fail(state: RequestState, completion: CompletionState, error: Exception) -> None:
    log.error("detokenising request %s failed", state.request.id, exc_info=error)
    detail = f": {error}" if isinstance(error, PluginLoadError) else ""
    completion.fail(f"the text of this output could not be made{detail}")


def merge_deltas(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Two deltas of one request as one, for a reader that is slower than the engine."""
    outputs = {output.index: output for output in first.outputs}
    for new in second.outputs:
        old = outputs.get(new.index)
        if old is not None:
            new = msgspec.structs.replace(
                new,
                text=old.text + new.text,
                token_ids=old.token_ids + new.token_ids,
                logprobs=None if new.logprobs is None else (old.logprobs or []) + new.logprobs,
            )
        outputs[new.index] = new
    return msgspec.structs.replace(
        second,
        outputs=list(outputs.values()),
        prompt_logprobs=first.prompt_logprobs or second.prompt_logprobs,
    )
