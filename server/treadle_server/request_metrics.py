"""The times and token counts of one request, for the histograms and ``usage``."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from treadle.api.sampling_params import SamplingParams
from treadle.errors import CheckpointError, QueueFullError, RequestError
from treadle.outputs import CompletionOutput, ReasoningPart, RequestMetrics, RequestOutput
from treadle_server.active_requests import ClientDisconnected
from treadle_server.errors import APIError
from treadle_server.histogram import Histogram
from treadle_server.metrics import Metrics
from treadle_server.wire.common import CompletionTokensDetails, PromptTokensDetails, Usage

if TYPE_CHECKING:
    from treadle.api.files import Tokenizer
    from treadle_server.engine import Engine
    from treadle_server.generation import Generation

__all__ = ("RequestTimer", "TokenUsageCounter", "count_reasoning", "usage_of")

clock = time.monotonic


class RequestTimer:
    """Measures one request, for the histograms and the counts of ends.

    As a context manager it covers the whole request: what has not ended by itself at its exit was
    aborted or failed. Only ends are counted if ``has_histograms`` is not set.
    """

    __slots__ = (
        "_arrival",
        "_ends",
        "_histograms",
        "_last",
        "_lengths",
        "_metrics",
        "_num_expected",
        "_params",
        "_times",
    )

    def __init__(self, metrics: Metrics, *, has_histograms: bool = True) -> None:
        self._metrics = metrics
        self._histograms: Mapping[str, Histogram] | None = {} if has_histograms else None
        self._arrival = clock()
        self._last = 0.0
        self._num_expected = 0
        self._params = SamplingParams()
        self._ends: Counter[str] = Counter()
        self._lengths: list[int] = []
        self._times: list[tuple[RequestMetrics, int]] = []

    def begin(self, generation: Generation) -> None:
        """The request is checked and goes to the engine."""
        self._params = generation.params
        self._num_expected = len(generation.prompts) * generation.params.n
        if self._histograms is not None:
            operation = "text_completion" if generation.chat is None else "chat"
            self._histograms = self._metrics.requests[operation]

    def record_output(self) -> None:
        """A streamed output has come."""
        if not self._histograms:
            return
        now = clock()
        if self._last:
            self._histograms["inter_token_latency_seconds"].observe(now - self._last)
        else:
            self._histograms["time_to_first_token_seconds"].observe(now - self._arrival)
        self._last = now

    def record_end(self, reason: str | None, num_tokens: int) -> None:
        """One of the outputs has ended. A tool call ends it as an end of sequence does."""
        reason = reason or "abort"
        self._ends["stop" if reason == "tool_calls" else reason] += 1
        self._lengths.append(num_tokens)

    def record_prompt(self, output: RequestOutput, num_tokens: int) -> None:
        """All outputs of a prompt have ended, with ``num_tokens`` in the longest."""
        self._times.append((output.metrics, num_tokens))

    def record_outputs(self, outputs: Iterable[RequestOutput]) -> None:
        """The whole outputs of an answer that is not streamed have come."""
        for output in outputs:
            for completion in output.outputs:
                self.record_end(completion.finish_reason, len(completion.token_ids))
            lengths = (len(completion.token_ids) for completion in output.outputs)
            self.record_prompt(output, max(lengths, default=0))

    def record_finished(self, usage: Usage) -> None:
        """The request is complete."""
        if not (histograms := self._histograms):
            return
        histograms["e2e_request_latency_seconds"].observe(clock() - self._arrival)
        histograms["request_prompt_tokens"].observe(usage.prompt_tokens)
        histograms["request_generation_tokens"].observe(usage.completion_tokens)
        longest = max(self._lengths, default=0)
        histograms["request_max_num_generation_tokens"].observe(longest)
        histograms["request_params_n"].observe(self._params.n)
        if self._params.max_tokens is not None:
            histograms["request_params_max_tokens"].observe(self._params.max_tokens)
        for times, num_tokens in self._times:
            self._record_times(histograms, times, num_tokens)

    def _record_times(
        self, histograms: Mapping[str, Histogram], times: RequestMetrics, num_tokens: int
    ) -> None:
        """Record what the engine took for one prompt."""
        scheduled, first, last = times.scheduled_time, times.first_token_time, times.last_token_time
        if first is None or last is None:
            return
        decode, num_gaps = last - first, num_tokens - 1
        if not self._last:  # not streamed
            histograms["time_to_first_token_seconds"].observe(first - self._arrival)
            if num_gaps > 0:
                histograms["inter_token_latency_seconds"].observe(decode / num_gaps, num_gaps)
        if num_gaps > 0:
            histograms["request_time_per_output_token_seconds"].observe(decode / num_gaps)
        histograms["request_decode_time_seconds"].observe(decode)
        if scheduled is not None:
            queued = max(scheduled - times.arrival_time, 0.0)
            histograms["request_queue_time_seconds"].observe(queued)
            histograms["request_prefill_time_seconds"].observe(first - scheduled)
            histograms["request_inference_time_seconds"].observe(last - scheduled)

    def __enter__(self) -> RequestTimer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, _: object) -> None:
        missing = self._num_expected - self._ends.total()
        failed = isinstance(error, Exception) and is_failure(error)
        if failed and not self._num_expected:  # before it was known how many sequences there are
            missing = 1
        if kind is not None and missing > 0 and not issubclass(kind, RequestError):
            self._ends["error" if failed else "abort"] += missing
        self._metrics.finished.update(self._ends)
        if failed or self._ends["error"]:
            self._metrics.outcomes.add(failed=not (self._ends["stop"] or self._ends["length"]))
        elif self._ends["stop"] or self._ends["length"]:
            self._metrics.outcomes.add(failed=False)


def is_failure(error: Exception) -> bool:
    """Return whether the server is to blame: not the client, nor a server that is full or stops."""
    if isinstance(error, APIError):
        return error.status >= 500 and error.detail.code != "draining"
    blameless = ClientDisconnected, RequestError, CheckpointError, QueueFullError
    return not isinstance(error, blameless)


class TokenUsageCounter:
    """Counts the tokens of a streamed request with one or several prompts.

    Tokens of an output up to the last that completed a piece of reasoning are reasoning.
    """

    __slots__ = ("_cached", "_generated", "_longest", "_prompts", "_reasoning", "_timer")

    def __init__(self, timer: RequestTimer) -> None:
        self._timer = timer
        self._prompts: dict[int, int] = {}
        self._cached: dict[int, int] = {}
        self._generated: Counter[tuple[int, int]] = Counter()
        self._longest: dict[int, int] = {}
        self._reasoning: dict[tuple[int, int], int] = {}

    def add(self, prompt: int, output: RequestOutput) -> None:
        if prompt not in self._prompts:
            self._prompts[prompt] = len(output.prompt_token_ids)
        self._cached[prompt] = max(self._cached.get(prompt, 0), output.num_cached_tokens)
        for completion in output.outputs:
            key = prompt, completion.index
            self._generated[key] += len(completion.token_ids)
            if any(isinstance(part, ReasoningPart) for part in completion.parts or ()):
                self._reasoning[key] = self._generated[key]
            if completion.finish_reason is not None:
                length = self._generated[key]
                self._longest[prompt] = max(self._longest.get(prompt, 0), length)
                self._timer.record_end(completion.finish_reason, length)
        if output.finished:
            self._timer.record_prompt(output, self._longest.get(prompt, 0))

    @property
    def usage(self) -> Usage:
        return new_usage(
            sum(self._prompts.values()),
            sum(self._generated.values()),
            cached=sum(self._cached.values()),
            reasoning=sum(self._reasoning.values()),
        )


def new_usage(prompt: int, generated: int, *, cached: int = 0, reasoning: int = 0) -> Usage:
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=generated,
        total_tokens=prompt + generated,
        prompt_tokens_details=PromptTokensDetails(cached),
        completion_tokens_details=CompletionTokensDetails(reasoning),
    )


def usage_of(outputs: Iterable[RequestOutput], num_reasoning_tokens: int = 0) -> Usage:
    """Return the usage of finished outputs."""
    outputs = list(outputs)
    return new_usage(
        sum(len(output.prompt_token_ids) for output in outputs),
        sum(len(completion.token_ids) for output in outputs for completion in output.outputs),
        cached=sum(output.num_cached_tokens for output in outputs),
        reasoning=num_reasoning_tokens,
    )


async def count_reasoning(engine: Engine, outputs: Sequence[RequestOutput], client: str) -> int:
    """Return how many tokens of finished outputs are reasoning."""
    completions = [c for output in outputs for c in output.outputs if c.reasoning]
    if not completions:
        return 0
    tokenizer, size = engine.tokenizer, sum(len(completion.text) for completion in completions)
    return await engine.texts.run(
        lambda: sum(_num_reasoning_tokens(completion, tokenizer) for completion in completions),
        size,
        client=client,
        inline=True,
    )


def _num_reasoning_tokens(completion: CompletionOutput, tokenizer: Tokenizer) -> int:
    """Return the length of the shortest prefix of the ids that holds all of the reasoning."""
    reasoning, ids = completion.reasoning or "", completion.token_ids
    text = tokenizer.decode(ids, skip_special_tokens=False)
    end = max(text.find(reasoning), 0) + len(reasoning)
    return bisect_left(
        range(len(ids)),
        end,
        key=lambda n: len(tokenizer.decode(ids[:n], skip_special_tokens=False)),
    )
