"""Outputs with vLLM's attributes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from treadle import outputs as ours

__all__ = ("CompletionOutput", "RequestOutput", "from_treadle")


@dataclass
class CompletionOutput:
    """One of the ``n`` outputs of a request."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, ours.Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """A request and its outputs so far."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: list[dict[int, ours.Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: ours.RequestMetrics | None = None
    lora_request: None = None
    encoder_prompt: None = None
    encoder_prompt_token_ids: None = None
    num_cached_tokens: int | None = None


def from_treadle(output: ours.RequestOutput, request_id: str | None = None) -> RequestOutput:
    """Return an output of treadle as vLLM's.

    Raises ``EngineError`` if it ended with an error, for which vLLM has no field.
    """
    from treadle.errors import EngineError

    for completion in output.outputs:
        if completion.finish_reason == "error":
            raise EngineError(f"request {output.request_id} failed: {completion.error}")
    names: dict[str, Any] = {
        name: getattr(output, name)
        for name in ("prompt", "prompt_token_ids", "prompt_logprobs", "finished", "metrics")
    }
    return RequestOutput(
        request_id=request_id or output.request_id,
        outputs=[
            CompletionOutput(
                o.index,
                o.text,
                o.token_ids,
                o.cumulative_logprob,
                o.logprobs,
                o.finish_reason,
                o.stop_reason,
            )
            for o in output.outputs
        ],
        num_cached_tokens=output.num_cached_tokens,
        **names,
    )
