"""Guided decoding: grammars are compiled before admission and mask each step's logits."""

from weft.guided.desk import GrammarDesk, Ticket
from weft.guided.guide import Guide

__all__ = ("GrammarDesk", "Guide", "Ticket")
