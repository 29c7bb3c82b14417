"""Where vLLM has its asynchronous engine since 0.9."""

from ...async_llm import AsyncLLM

__all__ = ("AsyncLLM",)
