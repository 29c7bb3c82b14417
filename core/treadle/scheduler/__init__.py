"""Continuous batching: choose the tokens of each step."""
