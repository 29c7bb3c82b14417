"""Random numbers that depend only on a sequence's seed and the token's position.

The generator is counter-based: SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom
number generators", OOPSLA 2014) evaluated at a counter. It only adds, multiplies and shifts 64-bit
integers, which wrap the same way on every device, so a CPU and a GPU draw the same numbers. The
seed determines both offset and stride, so that sequences of two seeds do not overlap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ("BITS", "STREAMS", "keys", "uniforms")

STREAMS = 2
"""Independent numbers per position: one selects a block of the vocabulary, one a token in it."""
# The product of a 52-bit number in [0, 1) with an integer T < 2^52 stays below T after rounding.
# With 53 bits it could round up to T, an index past the end.
BITS = 52

WORD = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)


def keys(seed: int) -> tuple[int, int, int, int]:
    """Return two offsets and two strides (signed 64-bit) of ``seed``, for ``uniforms``."""
    offset = mix((seed + GOLDEN) & WORD)
    stride = mix((offset + GOLDEN) & WORD) | 1
    # A stride with few bit changes makes successive counters too similar (section 5 of the paper).
    if (stride ^ (stride >> 1)).bit_count() < 24:
        stride ^= 0xAAAAAAAAAAAAAAAA
    # Position p uses the counters 2p and 2p + 1, hence the doubled stride.
    step = signed(2 * stride)
    return signed(offset), signed(offset + stride), step, step


def uniforms(offsets: Tensor, strides: Tensor, positions: Tensor) -> Tensor:
    """Return uniform numbers in ``[0, 1)``, float64 ``[rows, STREAMS]``.

    ``offsets`` and ``strides`` are int64 ``[rows, STREAMS]`` (see ``keys``), ``positions`` int64
    ``[rows]``. Every result is a multiple of ``2**-BITS``.
    """
    z = offsets.addcmul(positions.unsqueeze(1), strides)
    z = (z ^ logical_shift(z, SHIFTS[0])).mul_(signed(MULTIPLIERS[0]))
    z = (z ^ logical_shift(z, SHIFTS[1])).mul_(signed(MULTIPLIERS[1]))
    z = z ^ logical_shift(z, SHIFTS[2])
    return logical_shift(z, 64 - BITS).double().mul_(2.0**-BITS)


def logical_shift(z: Tensor, num_bits: int) -> Tensor:
    # torch shifts int64 arithmetically; the mask clears the copies of the sign.
    return (z >> num_bits).bitwise_and_((1 << (64 - num_bits)) - 1)


def mix(z: int) -> int:
    """Apply SplitMix64's output function to an unsigned 64-bit integer."""
    z = ((z ^ (z >> SHIFTS[0])) * MULTIPLIERS[0]) & WORD
    z = ((z ^ (z >> SHIFTS[1])) * MULTIPLIERS[1]) & WORD
    return z ^ (z >> SHIFTS[2])


def signed(z: int) -> int:
    z &= WORD
    return z - (1 << 64) if z >> 63 else z
