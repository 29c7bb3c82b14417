"""The innermost loops of treadle-kernels-native against torch, on every instruction set of the machine."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable
from ctypes import CFUNCTYPE, c_float, c_int64, c_void_p
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from treadle_kernels_native import library
from treadle_kernels_native.int4 import levels_struct
from treadle_kernels_native.structs import InstructionSet

# Where there is a compiler, a library that was not built is a failure of the build hook.
if library.missing_reason() is not None and shutil.which("cc") is None:
    pytest.skip(str(library.missing_reason()), allow_module_level=True)

LIBRARY = library.load_library()
SETS = library.instruction_sets(LIBRARY)
DOT = (c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int64)
CODES = (
    *(c_void_p, c_int64, c_int64, c_void_p),  # x, its sums
    *(c_void_p, c_int64, c_void_p, c_void_p),  # codes, scales, offsets
)
DOT_GROUPS = (*CODES, c_int64, c_int64, c_int64, c_void_p, c_int64)
DOT_INT4 = (*CODES, c_void_p, *DOT_GROUPS[len(CODES) :])
UNPACK_INT4 = (c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_void_p)
UNPACK = (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_void_p)
MIX = (c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int64, c_void_p)
FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "dot_f32": (None, DOT),
    "dot_f32_bf16": (None, DOT),
    "dot_bf16": (None, DOT),
    "dot_int8": (None, DOT),
    "dot_int4": (None, DOT_INT4),
    "dot_groups": (None, DOT_GROUPS),
    "unpack_int4": (None, UNPACK_INT4),
    "unpack_int8": (None, UNPACK),
    "unpack_fp8": (None, UNPACK),
    "mix_f32": (None, MIX),
    "mix_bf16": (None, MIX),
    "scale_max": (c_float, (c_void_p, c_int64, c_float)),
    "exp_sum": (c_float, (c_void_p, c_int64, c_float)),
    "rms_norm": (None, (c_void_p, c_void_p, c_float, c_int64, c_void_p)),
    "rotate": (None, (c_void_p, c_void_p, c_void_p, c_int64)),
    "silu_mul": (None, (c_void_p, c_void_p, c_int64, c_void_p)),
    "to_bf16": (None, (c_void_p, c_int64, c_void_p)),
    "to_f32": (None, (c_void_p, c_int64, c_void_p)),
    "to_uint8": (c_float, (c_void_p, c_int64, c_void_p)),
    "argmax": (c_int64, (c_void_p, c_int64)),
}
"""``tn_kernels`` of ``csrc/internal.h``, in its order; the number ``zero`` is behind them."""
SIZES = (16, 32, 48, 96, 320, 1024)


class Loops:
    """The functions of one instruction set, on tensors."""

    def __init__(self, isa: InstructionSet) -> None:
        address = LIBRARY.tn_kernels_test(isa)
        table = (c_void_p * len(FUNCTIONS)).from_address(address)
        self.zero = c_int64.from_address(address + ctypes.sizeof(table)).value
        self._functions = {
            name: CFUNCTYPE(result, *arguments)(address) if address else None
            for (name, (result, arguments)), address in zip(FUNCTIONS.items(), table, strict=True)
        }

    def __getattr__(self, name: str) -> Callable[..., Any] | None:
        function: Any = self._functions[name]

        def call(*arguments: Any) -> Any:
            return function(*(a.data_ptr() if isinstance(a, Tensor) else a for a in arguments))

        return None if function is None else call

    def codes(self, x: Tensor) -> Tensor:
        """Bytes as the codes of activations that this set multiplies, signed or not."""
        return x if self.zero else x.view(torch.int8)


@pytest.fixture(scope="module", params=SETS)
def loops(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    return Loops(request.param)


def near(actual: Tensor, expected: Tensor, error: float) -> None:
    torch.testing.assert_close(actual, expected.to(actual.dtype), atol=error, rtol=0)


@pytest.mark.parametrize("k", [32, 64, 96, 512])
def test_products_of_rows(loops: Any, k: int) -> None:
    """Every remainder of the numbers of rows and columns that registers hold, within wider matrices."""
    for m, n in ((1, 1), (1, 9), (2, 8), (5, 3), (6, 4), (7, 13), (13, 5)):
        x, w = torch.randn(m, k + 32)[:, :k], torch.randn(n, k + 64)[:, :k] / k**0.5
        half_x, half_w = x.bfloat16(), w.bfloat16()
        bytes_x = torch.randint(0, 256, (m, k), dtype=torch.uint8)
        codes = torch.randint(-127, 128, (n, k), dtype=torch.int8)
        for name, left, right in (
            ("dot_f32", x, w),
            ("dot_f32_bf16", x, half_w),
            ("dot_bf16", half_x, half_w),
            ("dot_int8", loops.codes(bytes_x), codes),
        ):
            function = getattr(loops, name)
            if function is None:
                continue
            dtype = torch.int32 if name == "dot_int8" else torch.float32
            y = torch.full((m, n + 3), -7, dtype=dtype)
            function(left, left.stride(0), m, right, right.stride(0), n, k, y, n + 3)
            near(y[:, :n], left.double() @ right.double().T, 0 if dtype == torch.int32 else 3e-5)
            assert torch.all(y[:, n:] == -7)


@pytest.mark.parametrize(
    ("k", "group"),
    [(128, 64), (384, 64), (512, 128), (384, 192), (768, 384), (1152, 64), (256, 32), (1152, 32)],
)
def test_products_of_four_bits(loops: Any, k: int, group: int) -> None:
    """Whole numbers times scales that are powers of two: exact, whatever the order of sums.

    Offsets, which are whole numbers of scales, count once for each of the numbers that bytes stand for.
    """
    for m, n in ((1, 1), (1, 9), (2, 8), (5, 3), (8, 4), (7, 13)):
        x = loops.codes(torch.randint(0, 256, (m, k + 32), dtype=torch.uint8)[:, :k])
        codes = torch.randint(0, 256, (n, k // 2 + 32), dtype=torch.uint8)
        scales = 2.0 ** torch.randint(-3, 3, (n, k // group))
        pairs = codes.view(torch.int8)[:, : k // 2].unflatten(1, (-1, 64))
        numbers = torch.cat([pairs << 4 >> 4, pairs >> 4], 2).flatten(1).double()
        weight = numbers * scales.double().repeat_interleave(group, 1)
        offsets = scales * torch.randint(-8, 9, scales.shape)
        sums = (x.float() - loops.zero).unflatten(1, (-1, group)).sum(2)
        added = sums.double() @ offsets.double().T
        for others in (None, offsets):
            y = torch.full((m, n + 3), -7.0)
            loops.dot_int4(
                x, x.stride(0), m, sums, codes, k + 64, scales, others, None, group, n, k, y, n + 3
            )
            near(y[:, :n], x.double() @ weight.T + (0 if others is None else added), 0)
            assert torch.all(y[:, n:] == -7)


@pytest.mark.parametrize(
    ("k", "group"), [(32, 16), (96, 32), (288, 16), (512, 64), (384, 128), (1152, 384)]
)
def test_products_of_bytes_in_groups(loops: Any, k: int, group: int) -> None:
    """Exact, as those of four bits; the last 32 inputs may be alone."""
    for m, n in ((1, 1), (1, 9), (2, 8), (5, 3), (8, 4), (7, 13)):
        x = loops.codes(torch.randint(0, 256, (m, k + 32), dtype=torch.uint8)[:, :k])
        codes = torch.randint(-128, 128, (n, k + 32), dtype=torch.int8)
        scales = 2.0 ** torch.randint(-2, 2, (n, k // group))
        weight = codes[:, :k].double() * scales.double().repeat_interleave(group, 1)
        offsets = scales * torch.randint(-8, 9, scales.shape)
        sums = (x.float() - loops.zero).unflatten(1, (-1, group)).sum(2)
        added = sums.double() @ offsets.double().T
        for others in (None, offsets):
            y = torch.full((m, n + 3), -7.0)
            loops.dot_groups(
                x, x.stride(0), m, sums, codes, k + 32, scales, others, group, n, k, y, n + 3
            )
            near(y[:, :n], x.double() @ weight.T + (0 if others is None else added), 0)
            assert torch.all(y[:, n:] == -7)


@pytest.mark.parametrize(
    ("k", "group"), [(128, 32), (384, 96), (512, 128), (384, 64), (768, 384), (1152, 1152)]
)
def test_rows_of_four_bits_are_unpacked(loops: Any, k: int, group: int) -> None:
    pairs = torch.randint(0, 256, (k // 2 + 32,), dtype=torch.uint8)
    halves = pairs.view(torch.int8)[: k // 2].unflatten(0, (-1, 64))
    numbers = torch.cat([halves << 4 >> 4, halves >> 4], 1).flatten()
    levels = levels_struct(sorted(torch.randn(16).bfloat16().tolist()))
    for table in (None, levels):
        address = None if table is None else ctypes.addressof(table)

        def unpack(codes: Tensor, scales: Tensor, offsets: Tensor | None, *others: Any) -> None:
            loops.unpack_int4(codes, scales, offsets, address, *others)  # noqa: B023

        meant = (
            numbers if table is None else torch.tensor(list(table.numbers))[(numbers & 15).long()]
        )
        check_unpacked(unpack, pairs, meant, group)


@pytest.mark.parametrize(("k", "group"), [(256, 16), (256, 32), (288, 96), (512, 512)])
def test_rows_of_bytes_are_unpacked(loops: Any, k: int, group: int) -> None:
    """Every code: of FP8 the two of NaN are none of a checkpoint."""
    codes = torch.arange(k + 32).to(torch.uint8)[torch.randperm(k + 32)]
    check_unpacked(loops.unpack_int8, codes, codes[:k].view(torch.int8), group)
    codes[codes & 127 == 127] = 1
    check_unpacked(loops.unpack_fp8, codes, codes[:k].view(torch.float8_e4m3fn), group)


def check_unpacked(unpack: Any, codes: Tensor, numbers: Tensor, group: int) -> None:
    """As in checkpoints: scales in half precision, of which multiples are exact."""
    k = len(numbers)
    scale, zeros = torch.randn(k // group).half().float(), torch.randint(-8, 9, (k // group,))
    for zero in (torch.zeros_like(zeros), zeros):
        row = torch.full((k + 32,), -7.0, dtype=torch.bfloat16)
        unpack(codes, scale, zero * scale if zero.any() else None, group, k, row)
        spread = scale.repeat_interleave(group)
        expected = (numbers.float() + zero.repeat_interleave(group)) * spread
        assert torch.equal(row[:k], expected.bfloat16()) and torch.all(row[k:] == -7)


def test_a_result_depends_on_its_own_rows_only(loops: Any) -> None:
    """Bit by bit: alone or among others, whatever the order of sums."""
    m, n, k = 23, 21, 384
    x, w, scales = torch.randn(m, k), torch.randn(n, k), torch.randn(n, k // 32)
    x_codes = torch.randint(0, 256, (m, k), dtype=torch.uint8)
    w_codes = torch.randint(0, 256, (n, k), dtype=torch.uint8)
    sums, offsets = torch.randn(m, k // 32), torch.randn(n, k // 32)

    def grouped(name: str) -> Callable[..., None]:
        def product(left: Tensor, r: int, right: Tensor, c: int, *size: int, y: Tensor) -> None:
            rows, columns = size
            levels = (None,) if name == "dot_int4" else ()
            group = (scales[c:], offsets[c:], *levels, 32, columns, k)
            getattr(loops, name)(left[r:], k, rows, sums[r:], right[c:], k, *group, y, columns)

        return product

    def plain(name: str) -> Callable[..., None]:
        def product(left: Tensor, r: int, right: Tensor, c: int, *size: int, y: Tensor) -> None:
            getattr(loops, name)(left[r:], k, size[0], right[c:], k, size[1], k, y, size[1])

        return product

    for name, function, left, right in (
        ("dot_f32", plain("dot_f32"), x, w),
        ("dot_f32_bf16", plain("dot_f32_bf16"), x, w.bfloat16()),
        ("dot_bf16", plain("dot_bf16"), x.bfloat16(), w.bfloat16()),
        ("dot_int4", grouped("dot_int4"), x_codes, w_codes[:, : k // 2].contiguous()),
        ("dot_groups", grouped("dot_groups"), x_codes, w_codes),
    ):
        if getattr(loops, name) is None:
            continue
        together = torch.empty(m, n)
        function(left, 0, right, 0, m, n, y=together)
        for rows, columns in ((1, 1), (1, 8), (2, 9), (5, 4), (8, 4), (9, 8)):
            for r, c in ((0, 0), (3, 2), (m - rows, n - columns)):
                y = torch.empty(rows, columns)
                function(left, r, right, c, rows, columns, y=y)
                assert torch.equal(y, together[r : r + rows, c : c + columns]), (
                    name,
                    rows,
                    columns,
                )


@pytest.mark.parametrize("d", [32, 64, 96, 128, 256])
def test_values_times_weights(loops: Any, d: int) -> None:
    for m, keys in ((1, 1), (2, 5), (3, 16), (7, 64)):
        p, keep, before = torch.rand(m, 64), torch.rand(m), torch.randn(m, d)
        values = torch.randn(keys, 2 * d)[:, :d]
        for name, v in (("mix_f32", values), ("mix_bf16", values.bfloat16())):
            y = before.clone()
            getattr(loops, name)(p, 64, keep, m, v, v.stride(0), keys, d, y)
            near(y, before.double() * keep[:, None] + p[:, :keys].double() @ v.double(), 3e-5)


@pytest.mark.parametrize("n", SIZES)
def test_softmax_in_parts(loops: Any, n: int) -> None:
    x = torch.randn(n) * 20
    x[n // 2 :: 5] = -torch.inf
    y = x.clone()
    largest = loops.scale_max(y, n, 0.3)
    near(y, x * 0.3, 0)
    assert largest == float((x * 0.3).max())
    total = loops.exp_sum(y, n, largest)
    expected = (x.double() * 0.3 - largest).exp()
    near(y, expected, 2e-6)
    assert total == pytest.approx(float(expected.sum()), rel=2e-6)
    nothing = torch.full((n,), -torch.inf)
    assert loops.scale_max(nothing, n, 2.0) == -torch.inf


@pytest.mark.parametrize("n", SIZES)
def test_norms_and_activations(loops: Any, n: int) -> None:
    x, weight = torch.randn(n) * 3, torch.randn(n)
    y = torch.empty(n)
    loops.rms_norm(x, weight, 1e-5, n, y)
    near(y, F.rms_norm(x.double(), (n,), weight.double(), 1e-5), 5e-6)
    in_place = x.clone()
    loops.rms_norm(in_place, weight, 1e-5, n, in_place)
    assert torch.equal(in_place, y)
    gate, up = torch.randn(n) * 10, torch.randn(n)
    gate[0], gate[1] = -200.0, 200.0
    loops.silu_mul(gate, up, n, y)
    torch.testing.assert_close(y, (F.silu(gate.double()) * up).float(), atol=1e-6, rtol=2e-6)


@pytest.mark.parametrize("half", [16, 32, 48, 64, 128])
def test_rotary_embedding(loops: Any, half: int) -> None:
    x, angles = torch.randn(2 * half), torch.randn(half)
    cos, sin = angles.cos(), angles.sin()
    y = x.clone()
    loops.rotate(y, cos, sin, half)
    a, b = x[:half], x[half:]
    near(y, torch.cat((a * cos - b * sin, b * cos + a * sin)), 1e-6)


def test_conversions_equal_those_of_torch(loops: Any) -> None:
    """Bit by bit: ties, numbers that overflow, the smallest, infinities and NaN."""
    bits = torch.randint(-(2**31), 2**31 - 1, (4096,), dtype=torch.int64).to(torch.int32)
    bits[:8] = torch.tensor(
        [0x3F808000, 0x3F818000, 0x7F7FFFFF, 1, 0x8000, 0x7F800000, 0, -(2**31)]
    )
    x = bits.view(torch.float32)
    half = torch.empty(4096, dtype=torch.bfloat16)
    loops.to_bf16(x, 4096, half)
    expected = x.bfloat16()
    real = ~x.isnan()
    assert torch.equal(half[real].view(torch.int16), expected[real].view(torch.int16))
    assert torch.all(half[~real].isnan())
    back = torch.empty(4096)
    loops.to_f32(half, 4096, back)
    assert torch.equal(back[real], expected[real].float())


@pytest.mark.parametrize("n", SIZES)
def test_rows_in_eight_bits(loops: Any, n: int) -> None:
    x = torch.randn(n)
    codes = torch.empty(n, dtype=torch.uint8)
    scale = loops.to_uint8(x, n, codes)
    assert scale == pytest.approx(float(x.abs().max()) / 127, rel=1e-6)
    near((loops.codes(codes).float() - loops.zero) * scale, x, scale * 0.501)
    assert loops.to_uint8(torch.zeros(n), n, codes) == 0
    assert torch.all(codes == loops.zero)


@pytest.mark.parametrize("n", [1, 15, 16, 17, 320, 1003])
def test_argmax_takes_the_first_of_equals(loops: Any, n: int) -> None:
    x = torch.randn(n)
    assert loops.argmax(x, n) == int(x.argmax())
    for i in {0, n // 2, n - 1}:
        y = x.clone()
        y[i], y[-1] = 9.0, 9.0
        assert loops.argmax(y, n) == i
        y[i] = torch.nan
        assert loops.argmax(y, n) == -1
        y[:] = -torch.inf
        assert loops.argmax(y, n) == -1
        y[i] = -3.0
        assert loops.argmax(y, n) == i
        y[i] = torch.inf
        assert loops.argmax(y, n) == i


def test_an_instruction_set_that_the_machine_lacks_has_no_loops() -> None:
    for isa in (-1, max(InstructionSet) + 1, *set(InstructionSet) - set(SETS)):
        assert LIBRARY.tn_kernels_test(isa) is None
    assert ctypes.sizeof(c_void_p) == 8
