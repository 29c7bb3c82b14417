"""Where vLLM has its engine."""

from ..llm_engine import LLMEngine

__all__ = ("LLMEngine",)
