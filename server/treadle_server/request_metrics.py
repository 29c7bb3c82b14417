"""The times and token counts of one request, for the histograms and ``usage``."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from treadle.outputs import CompletionOutput, ReasoningPart, RequestOutput
from treadle_server.metrics import Metrics
from treadle_server.wire.common import CompletionTokensDetails, PromptTokensDetails, Usage

if TYPE_CHECKING:
    from treadle.api.files import Tokenizer
    from treadle_server.engine import Engine

__all__ = ("RequestTimer", "TokenUsageCounter", "count_reasoning", "usage_of")

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
    """Counts the tokens of a streamed request with one or several prompts.

    Tokens of an output up to the last that completed a piece of reasoning are reasoning.
    """

    __slots__ = ("_cached", "_generated", "_prompts", "_reasoning")

    def __init__(self) -> None:
        self._prompts: dict[int, int] = {}
        self._cached: dict[int, int] = {}
        self._generated: Counter[tuple[int, int]] = Counter()
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
