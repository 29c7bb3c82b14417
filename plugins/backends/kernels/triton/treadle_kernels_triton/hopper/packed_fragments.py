"""Words of packed weights become fragments of tensor cores, in the registers of the threads that read them.

Thread ``32 warp + 4 r + c`` of a warp group holds, of the left side ``[64, 16]`` of one instruction, outputs
``16 warp + 8 g + r`` and inputs ``8 h + 2 c + e`` (g, h, e: 0 or 1), those of both ``e`` in one register. In the layouts of
``treadle_layers_kit`` word ``i`` of an output holds inputs ``i``, ``run + i``, … of a chunk. With ``i = 16 t + 8 h + 2 c + e``,
32 bits of memory are two words that differ in ``e`` alone: at each place of them are the codes of one register,
16 bits apart. Nothing moves between threads, and a thread reads no word whose codes it does not need.

The 128 inputs of a stage are ``128 / run`` runs, each of one place of the words of one chunk, and of one group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from treadle_kernels_triton.hopper.split_tiles import split_pair

__all__ = ("STAGE", "WeightFormat", "fetch_half", "make_half", "weight_format")

STAGE = gl.constexpr(128)
"""Inputs of a stage."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """What a kernel is compiled for.

    ``asm`` makes numbers of two words, for each of their ``places``. ``run``: the words of a chunk; ``group``: the inputs that
    share a scale. ``scales`` and ``offsets``: their kind, ``""`` for none, ``float``, ``fp8``, ``exponent``, or for scales alone ``int4``, the
    steps of ``treadle_layers_kit.int4_layout``. ``power``, unless it is 0: ``asm`` takes scales, too, multiplied by it, and sums
    are to be multiplied by it once more.
    """

    asm: str
    places: int
    run: int
    group: int
    scales: str
    offsets: str
    has_factors: bool
    power: float

    @property
    def chunks(self) -> int:
        """Of a stage."""
        return 128 // (self.run * self.places)

    @property
    def keeps_numbers(self) -> bool:
        """Whether both halves of a stage are looked up at once, for most of the work is the same for all places."""
        return self.chunks == 1 and "prmt" in self.asm

    @property
    def steps(self) -> int:
        """Groups of a stage, or one of which it is a part."""
        return max(1, 128 // self.group)

    @property
    def stages_per_group(self) -> int:
        """How many stages read the same scales."""
        return max(1, self.group // 128)


@gluon.constexpr_function
def weight_format(*fields: Any) -> WeightFormat:
    """One of these fields."""
    return WeightFormat(*fields)


@gluon.constexpr_function
def pairs_layout(run: int) -> Any:
    """Of pairs of words ``[64, run / 2]``: output ``16 warp + 8 g + r``, pair ``8 t + 4 h + c``."""
    return gl.DistributedLinearLayout(
        [[8, 0], [0, 4], *([0, 8 << t] for t in range((run // 32).bit_length()))],
        [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, run // 2],
    )


@gluon.constexpr_function
def memory_layout(run: int) -> Any:
    """The same in shared memory, ``[run, 32]``: a row has as many outputs as fit into its 128 bytes."""

    def output(bit: int) -> list[int]:
        place = run // 2 << bit
        return [0, place] if place < 32 else [place // 32, 0]

    return gl.DistributedLinearLayout(
        [output(3), [0, 4], *([0, 8 << t] for t in range((run // 32).bit_length()))],
        [[0, 1], [0, 2], output(0), output(1), output(2)],
        [output(4), output(5)],
        [],
        [run, 32],
    )


@gluon.jit
def load_words(codes_smem, piece, FORMAT: gl.constexpr):
    """Pairs of words of 64 outputs of a chunk, int32 ``[64, run / 2]``."""
    RUN: gl.constexpr = FORMAT.run
    words = codes_smem.index(piece).load(memory_layout(RUN))
    return gl.convert_layout(
        gl.reshape(words, [64, RUN // 2]), pairs_layout(RUN), assert_trivial=True
    )


@gluon.jit
def load_step(smem, row, IS_OFFSET: gl.constexpr, FORMAT: gl.constexpr, DTYPE: gl.constexpr):
    """A scale of 64 outputs, times the power, or an offset: rounded to ``DTYPE``, twice in 32 bits, ``[64, 1]``."""
    KIND: gl.constexpr = FORMAT.offsets if IS_OFFSET else FORMAT.scales
    SUFFIX: gl.constexpr = "bf16x2" if DTYPE.is_bf16() else "f16x2"
    raw = smem.index(row).load(gl.SliceLayout(1, pairs_layout(FORMAT.run)))
    if KIND == "exponent":
        value = (raw.to(gl.int32) << 23).to(gl.float32, bitcast=True)
    elif KIND == "fp8":
        value = raw.to(gl.float8e4nv, bitcast=True).to(gl.float32)
    elif KIND == "int4":
        value = (raw >> 16).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
    else:
        value = raw.to(gl.float32)
    if FORMAT.power > 0:
        value = value * FORMAT.power
    twice = gl.inline_asm_elementwise(
        "cvt.rn." + SUFFIX + ".f32 $0, $1, $1;", "=r,r", [value],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    return twice[:, None]


@gluon.jit
def load_zero(smem, row, FORMAT: gl.constexpr):
    """Of steps of four bits what is to be added to a code below the bits of a number, twice: ``[64, 1]``."""
    raw = smem.index(row).load(gl.SliceLayout(1, pairs_layout(FORMAT.run)))
    zero = gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, 0, 0x1010;", "=r,r", [raw], dtype=gl.int32, is_pure=True, pack=1
    )
    return zero[:, None]


@gluon.jit
def load_steps(
    smem, slot, HALF: gl.constexpr, IS_OFFSET: gl.constexpr,
    WARP_GROUP: gl.constexpr, FORMAT: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Those of four runs from the first of half a stage on; beyond the half they are of any."""
    row0 = step_row(slot, HALF, 0, WARP_GROUP, FORMAT)
    row1 = step_row(slot, HALF, 1, WARP_GROUP, FORMAT)
    row2 = step_row(slot, HALF, 2, WARP_GROUP, FORMAT)
    row3 = step_row(slot, HALF, 3, WARP_GROUP, FORMAT)
    if IS_OFFSET and FORMAT.scales == "int4":
        s0, s1 = load_zero(smem, row0, FORMAT), load_zero(smem, row1, FORMAT)
        s2, s3 = load_zero(smem, row2, FORMAT), load_zero(smem, row3, FORMAT)
    else:
        s0 = load_step(smem, row0, IS_OFFSET, FORMAT, DTYPE)
        s1 = load_step(smem, row1, IS_OFFSET, FORMAT, DTYPE)
        s2 = load_step(smem, row2, IS_OFFSET, FORMAT, DTYPE)
        s3 = load_step(smem, row3, IS_OFFSET, FORMAT, DTYPE)
    return s0, s1, s2, s3


@gluon.jit
def fetch_half(
    codes_smem, scales_smem, offsets_smem, slot, HALF: gl.constexpr,
    WARP_GROUP: gl.constexpr, FORMAT: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """What the weights of half a stage are made of: words, of two chunks if it has two, and for each of up to four runs
    what multiplies and what is added, or words where a format has no such thing.

    Where numbers are kept, those of the second half in place of words.
    """
    CHUNK_IDX: gl.constexpr = HALF * FORMAT.chunks // 2
    piece = (slot * FORMAT.chunks + CHUNK_IDX) * 2 + WARP_GROUP
    words = load_words(codes_smem, piece, FORMAT)
    more_words = load_words(codes_smem, piece + 2, FORMAT) if FORMAT.chunks == 4 else words
    if FORMAT.keeps_numbers and HALF == 1:
        _, _, words, more_words = numbers_of(words, (words, words, words, words), FORMAT)
    scales = (words, words, words, words)
    offsets = scales
    if FORMAT.scales != "":
        scales = load_steps(scales_smem, slot, HALF, False, WARP_GROUP, FORMAT, DTYPE)
    if FORMAT.scales == "int4":
        offsets = load_steps(scales_smem, slot, HALF, True, WARP_GROUP, FORMAT, DTYPE)
    elif FORMAT.offsets != "":
        offsets = load_steps(offsets_smem, slot, HALF, True, WARP_GROUP, FORMAT, DTYPE)
    return words, more_words, scales, offsets


@gluon.jit
def step_row(slot, HALF: gl.constexpr, RUN_IDX: gl.constexpr, WARP_GROUP: gl.constexpr, FORMAT: gl.constexpr):  # fmt: skip
    """Where the scales of a run of half a stage are."""
    FIRST: gl.constexpr = HALF * 64 + RUN_IDX * FORMAT.run
    STEP: gl.constexpr = FIRST // FORMAT.group % FORMAT.steps
    return (slot * FORMAT.steps + STEP) * 2 + WARP_GROUP


@gluon.jit
def scaled(numbers, scale, offset, FORMAT: gl.constexpr, DTYPE: gl.constexpr):
    """Numbers by twos times their scale plus their offset, rounded once; int4's zero is added before, exactly."""
    SUFFIX: gl.constexpr = "bf16x2" if DTYPE.is_bf16() else "f16x2"
    MULTIPLY: gl.constexpr = "mul.rn." + SUFFIX + " $0, $1, $2;"
    if FORMAT.scales == "int4":
        # An addition of bfloat16 is an instruction of tensor maths only as part of a product.
        ADD: gl.constexpr = (
            "{ .reg .b32 one; mov.b32 one, 0x3f803f80; fma.rn.bf16x2 $0, $1, one, $2; }"
            if DTYPE.is_bf16()
            else "add.rn.f16x2 $0, $1, $2;"
        )
        numbers = gl.inline_asm_elementwise(
            ADD, "=r,r,r", [numbers, offset], dtype=gl.int32, is_pure=True, pack=1
        )
    if FORMAT.offsets != "":
        numbers = gl.inline_asm_elementwise(
            "fma.rn." + SUFFIX + " $0, $1, $2, $3;", "=r,r,r,r", [numbers, scale, offset],
            dtype=gl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    elif FORMAT.scales != "" and FORMAT.power == 0:
        numbers = gl.inline_asm_elementwise(
            MULTIPLY, "=r,r,r", [numbers, scale], dtype=gl.int32, is_pure=True, pack=1
        )
    return numbers


@gluon.jit
def numbers_of(words, scales, FORMAT: gl.constexpr):
    """Numbers by twos of each place of the words; of two places each twice."""
    if FORMAT.power > 0 and FORMAT.run == 32:  # two runs, whichever places are theirs
        scales = (scales[0], scales[1], scales[0], scales[1])
    if FORMAT.power > 0:
        n0, n1, n2, n3 = gl.inline_asm_elementwise(
            FORMAT.asm, "=&r,=&r,=&r,=&r,r,r,r,r,r", [words, scales[0], scales[1], scales[2], scales[3]],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    elif FORMAT.places == 4:
        n0, n1, n2, n3 = gl.inline_asm_elementwise(
            FORMAT.asm, "=&r,=&r,=&r,=&r,r", [words],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        n0, n1 = gl.inline_asm_elementwise(
            FORMAT.asm, "=&r,=&r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
        )
        n2, n3 = n0, n1
    return n0, n1, n2, n3


@gluon.jit
def side_by_side(a, b):
    """``[64, n]`` twice to ``[64, 2 n]``."""
    return gl.reshape(gl.permute(gl.join(a, b), [0, 2, 1]), [64, 2 * a.shape[1]])


@gluon.jit
def make_half(
    fetched, HALF: gl.constexpr, FORMAT: gl.constexpr, DTYPE: gl.constexpr, LAYOUT: gl.constexpr
):
    """The weights of half a stage from what ``fetch_half`` gave, ``[64, 64]`` of the layout ``LAYOUT``.

    Numbers of the other half are not made: nothing needs them, and compilers see that.
    """
    words, more_words, scales, offsets = fetched
    if FORMAT.keeps_numbers and HALF == 1:
        n0, n1, n2, n3 = words, words, words, more_words
    else:
        n0, n1, n2, n3 = numbers_of(words, scales, FORMAT)
    if FORMAT.chunks == 1 and FORMAT.places == 2:
        n0 = n1 if HALF == 1 else n0
    elif FORMAT.chunks == 1 and HALF == 1:
        n0, n1 = n2, n3
    elif FORMAT.chunks == 4:
        n2, n3, _, _ = numbers_of(more_words, scales, FORMAT)
    w = split_pair(scaled(n0, scales[0], offsets[0], FORMAT, DTYPE))
    if FORMAT.run < 64:
        w = side_by_side(w, split_pair(scaled(n1, scales[1], offsets[1], FORMAT, DTYPE)))
    if FORMAT.run < 32:
        right = side_by_side(
            split_pair(scaled(n2, scales[2], offsets[2], FORMAT, DTYPE)),
            split_pair(scaled(n3, scales[3], offsets[3], FORMAT, DTYPE)),
        )
        w = side_by_side(w, right)
    return gl.convert_layout(w.to(DTYPE, bitcast=True), LAYOUT, assert_trivial=True)
