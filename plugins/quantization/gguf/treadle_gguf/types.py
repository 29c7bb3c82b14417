"""The types of tensors: how many numbers a block has, in how many bytes."""

from __future__ import annotations

from types import MappingProxyType

__all__ = ("FLOATS", "TYPES", "TYPES_BY_NUMBER")

_TABLE = (
    (0, "F32", 1, 4),
    (1, "F16", 1, 2),
    (2, "Q4_0", 32, 18),
    (3, "Q4_1", 32, 20),
    (6, "Q5_0", 32, 22),
    (7, "Q5_1", 32, 24),
    (8, "Q8_0", 32, 34),
    (10, "Q2_K", 256, 84),
    (11, "Q3_K", 256, 110),
    (12, "Q4_K", 256, 144),
    (13, "Q5_K", 256, 176),
    (14, "Q6_K", 256, 210),
    (20, "IQ4_NL", 32, 18),
    (23, "IQ4_XS", 256, 136),
    (30, "BF16", 1, 2),
)
TYPES = MappingProxyType({name: (block, size) for _, name, block, size in _TABLE})
"""Numbers and bytes of a block, by the name of the type."""
TYPES_BY_NUMBER = MappingProxyType({number: name for number, name, _, _ in _TABLE})
FLOATS = ("F32", "F16", "BF16")
