"""The times and token counts of one request, for the histograms and ``usage``."""

from __future__ import annotations

import time
from collections.abc import Iterable

from treadle.outputs import RequestOutput
from treadle_server.metrics import Metrics
from treadle_server.wire.common import PromptTokensDetails, Usage

__all__ = ("RequestTimer", "TokenUsageCounter", "usage_of")

clock = time.monotonic


class RequestTimer:
    """Records when outputs come. Does nothing if ``metrics`` is ``None``."""

    __slots__ = ("_arrival", "_last", "_metrics")

    def __init__(self, metrics: Metrics | None) -> None:
        self._metrics = metrics
        self._arrival = clock()
        self._last = 0.0

    def record_output(self) -> None:
        """A streamed output has come."""
        if self._metrics is None:
            return
        now = clock()
        if self._last:
            self._metrics.inter_token.observe(now - self._last)
        else:
            self._metrics.time_to_first_token.observe(now - self._arrival)
        self._last = now

    def record_finished(self, usage: Usage, outputs: Iterable[RequestOutput] = ()) -> None:
        """The request is complete; ``outputs`` have their own times if it was not streamed."""
        if (metrics := self._metrics) is None:
            return
        metrics.latency.observe(clock() - self._arrival)
        metrics.prompt_lengths.observe(usage.prompt_tokens)
        metrics.output_lengths.observe(usage.completion_tokens)
        for output in outputs:
            first = output.metrics.first_token_time
            if first is not None and first >= output.metrics.arrival_time:
                metrics.time_to_first_token.observe(first - output.metrics.arrival_time)


class TokenUsageCounter:
    """Counts the tokens of a streamed request with one or several prompts."""

    __slots__ = ("_cached", "_generated", "_prompts")

    def __init__(self) -> None:
        self._prompts: dict[int, int] = {}
        self._cached: dict[int, int] = {}
        self._generated = 0

    def add(self, prompt: int, output: RequestOutput) -> None:
        if prompt not in self._prompts:
            self._prompts[prompt] = len(output.prompt_token_ids)
        self._cached[prompt] = max(self._cached.get(prompt, 0), output.num_cached_tokens)
        for completion in output.outputs:
            self._generated += len(completion.token_ids)

    @property
    def usage(self) -> Usage:
        num_prompt_tokens = sum(self._prompts.values())
        return Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=self._generated,
            total_tokens=num_prompt_tokens + self._generated,
            prompt_tokens_details=PromptTokensDetails(sum(self._cached.values())),
        )


def usage_of(outputs: Iterable[RequestOutput]) -> Usage:
    """Return the usage of finished outputs."""
    counter = TokenUsageCounter()
    for i, output in enumerate(outputs):
        counter.add(i, output)
    return counter.usage
