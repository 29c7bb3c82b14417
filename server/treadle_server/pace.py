"""The times of one request, for the histograms."""

from __future__ import annotations

import time
from collections.abc import Iterable

from treadle.outputs import RequestOutput
from treadle_server.metrics import Metrics
from treadle_server.wire.common import PromptTokensDetails, Usage

__all__ = ("Pace", "Tally", "usage_of")

clock = time.monotonic


class Pace:
    """Observes when outputs come. Does nothing but count if metrics are off."""

    __slots__ = ("_arrival", "_last", "_metrics")

    def __init__(self, metrics: Metrics | None) -> None:
        self._metrics = metrics
        self._arrival = clock()
        self._last = 0.0

    def tick(self) -> None:
        """A streamed output has come."""
        if self._metrics is None:
            return
        now = clock()
        if self._last:
            self._metrics.inter_token.observe(now - self._last)
        else:
            self._metrics.time_to_first_token.observe(now - self._arrival)
        self._last = now

    def end(self, usage: Usage, outputs: Iterable[RequestOutput] = ()) -> None:
        """The request is complete; ``outputs`` bring their own times if it was not streamed."""
        if (metrics := self._metrics) is None:
            return
        metrics.latency.observe(clock() - self._arrival)
        metrics.prompt_lengths.observe(usage.prompt_tokens)
        metrics.output_lengths.observe(usage.completion_tokens)
        for output in outputs:
            first = output.metrics.first_token
            if first is not None and first >= output.metrics.arrival:
                metrics.time_to_first_token.observe(first - output.metrics.arrival)


class Tally:
    """Counts the tokens of a streamed request with one or several prompts."""

    __slots__ = ("_cached", "_prompts", "generated")

    def __init__(self) -> None:
        self._prompts: dict[int, int] = {}
        self._cached: dict[int, int] = {}
        self.generated = 0

    def add(self, prompt: int, output: RequestOutput) -> None:
        if prompt not in self._prompts:
            self._prompts[prompt] = len(output.prompt_token_ids)
        self._cached[prompt] = max(self._cached.get(prompt, 0), output.num_cached_tokens)
        for one in output.outputs:
            self.generated += len(one.token_ids)

    @property
    def usage(self) -> Usage:
        return usage(sum(self._prompts.values()), self.generated, sum(self._cached.values()))


def usage(prompt: int, generated: int, cached: int) -> Usage:
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=generated,
        total_tokens=prompt + generated,
        prompt_tokens_details=PromptTokensDetails(cached),
    )


def usage_of(outputs: Iterable[RequestOutput]) -> Usage:
    """The usage of finished outputs."""
    tally = Tally()
    for i, output in enumerate(outputs):
        tally.add(i, output)
    return tally.usage
