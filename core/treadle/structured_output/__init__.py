"""Guided decoding: grammars are compiled before admission and mask each step's logits."""

from treadle.structured_output.manager import GrammarDesk, Ticket
from treadle.structured_output.state import Guide

__all__ = ("GrammarDesk", "Guide", "Ticket")
