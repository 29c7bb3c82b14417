"""Where vLLM has ``LLM``."""

from ..llm import LLM

__all__ = ("LLM",)
