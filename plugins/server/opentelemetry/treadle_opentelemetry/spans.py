"""The span of a prompt: what the semantic conventions of generative AI say about it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer
from opentelemetry.util.types import AttributeValue

__all__ = ("attributes_of", "record_prompt")


def record_prompt(tracer: Tracer, prompt: Any, model: str) -> None:
    """Record a span for a ``FinishedPrompt`` that the server answered with ``model``."""
    wall_clock_offset = time.time() - time.monotonic()

    def nanoseconds(moment: float) -> int:
        return int((moment + wall_clock_offset) * 1e9)

    times = prompt.times
    span = tracer.start_span(
        f"{prompt.operation} {model}",
        kind=SpanKind.INTERNAL,
        start_time=nanoseconds(times.arrival_time),
    )
    if span.is_recording():
        span.set_attributes(attributes_of(prompt, model))
        for name, moment in (
            ("scheduled", times.scheduled_time),
            ("first token", times.first_token_time),
        ):
            if moment is not None:
                span.add_event(name, timestamp=nanoseconds(moment))
        if prompt.error is not None:
            span.set_attribute("error.type", prompt.error)
            span.set_status(Status(StatusCode.ERROR))
    span.end(nanoseconds(prompt.end_time))


def attributes_of(prompt: Any, model: str) -> Mapping[str, AttributeValue]:
    """Return the attributes of a ``FinishedPrompt``. No text of the client or the model is in them
    but the name of the model."""
    params = prompt.params
    attributes: dict[str, AttributeValue | None] = {
        "gen_ai.operation.name": prompt.operation,
        "gen_ai.provider.name": "treadle",
        "gen_ai.request.model": prompt.model or model,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k if params.top_k > 0 else None,
        "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
        "gen_ai.request.presence_penalty": params.presence_penalty or None,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.choice.count": params.n if params.n > 1 else None,
        "gen_ai.request.stream": params.output_kind == "delta",
        "gen_ai.response.id": prompt.id,
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": prompt.finish_reasons,
        "gen_ai.usage.input_tokens": prompt.num_prompt_tokens,
        "gen_ai.usage.output_tokens": prompt.num_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": prompt.num_cached_tokens,
        **_latencies(prompt),
    }
    return {name: value for name, value in attributes.items() if value is not None}


def _latencies(prompt: Any) -> Mapping[str, AttributeValue | None]:
    """Return the times of a request, in seconds, under the names that vLLM's spans have."""
    times = prompt.times

    def between(start: float | None, end: float | None) -> float | None:
        return None if start is None or end is None else max(0.0, end - start)

    first_token = between(times.arrival_time, times.first_token_time)
    return {
        "gen_ai.response.time_to_first_chunk": first_token,
        "gen_ai.latency.time_to_first_token": first_token,
        "gen_ai.latency.time_in_queue": between(times.arrival_time, times.scheduled_time),
        "gen_ai.latency.time_in_model_prefill": between(
            times.scheduled_time, times.first_token_time
        ),
        "gen_ai.latency.time_in_model_decode": between(
            times.first_token_time, times.last_token_time
        ),
        "gen_ai.latency.e2e": between(times.arrival_time, prompt.end_time),
    }
