"""treadle: an LLM inference engine assembled from plugins. Importing it does not import torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treadle.api.sampling_params import SamplingParams, StructuredOutputsParams
    from treadle.config import EngineConfig
    from treadle.entrypoints.async_llm import AsyncLLM
    from treadle.entrypoints.llm import LLM
    from treadle.errors import TreadleError
    from treadle.outputs import (
        CompletionOutput,
        Logprob,
        ReasoningPart,
        RequestOutput,
        TextPart,
        ToolCall,
    )

__all__ = (
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineConfig",
    "Logprob",
    "ReasoningPart",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPart",
    "ToolCall",
    "TreadleError",
    "__version__",
)

__version__ = "0.1.0"

_HOMES = {
    "LLM": "treadle.entrypoints.llm",
    "AsyncLLM": "treadle.entrypoints.async_llm",
    "CompletionOutput": "treadle.outputs",
    "EngineConfig": "treadle.config",
    "StructuredOutputsParams": "treadle.api.sampling_params",
    "Logprob": "treadle.outputs",
    "ReasoningPart": "treadle.outputs",
    "RequestOutput": "treadle.outputs",
    "SamplingParams": "treadle.api.sampling_params",
    "TextPart": "treadle.outputs",
    "ToolCall": "treadle.outputs",
    "TreadleError": "treadle.errors",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'treadle' has no attribute {name!r}")
