"""Guided decoding: grammars are compiled before admission and mask each step's logits."""

from treadle.guided.desk import GrammarDesk, Ticket
from treadle.guided.guide import Guide

__all__ = ("GrammarDesk", "Guide", "Ticket")
