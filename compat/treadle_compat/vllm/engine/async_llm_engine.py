"""Where vLLM has its asynchronous engine."""

from ..async_llm import AsyncLLMEngine

__all__ = ("AsyncLLMEngine",)
