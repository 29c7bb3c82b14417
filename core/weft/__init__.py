"""weft: an LLM inference engine assembled from plugins. Importing it does not import torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.config import EngineConfig
    from weft.engine.async_llm import AsyncLLM
    from weft.engine.llm import LLM
    from weft.errors import WeftError
    from weft.outputs import CompletionOutput, Logprob, RequestOutput
    from weft.sampling.params import GuidedParams, SamplingParams

__all__ = (
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineConfig",
    "GuidedParams",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "WeftError",
    "__version__",
)

__version__ = "0.1.0"

_HOMES = {
    "LLM": "weft.engine.llm",
    "AsyncLLM": "weft.engine.async_llm",
    "CompletionOutput": "weft.outputs",
    "EngineConfig": "weft.config",
    "GuidedParams": "weft.sampling.params",
    "Logprob": "weft.outputs",
    "RequestOutput": "weft.outputs",
    "SamplingParams": "weft.sampling.params",
    "WeftError": "weft.errors",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'weft' has no attribute {name!r}")
