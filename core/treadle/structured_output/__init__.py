"""Structured output: grammars are compiled before admission and mask each step's logits."""

from treadle.structured_output.manager import StructuredOutputManager
from treadle.structured_output.state import StructuredOutputState

__all__ = ("StructuredOutputManager", "StructuredOutputState")
