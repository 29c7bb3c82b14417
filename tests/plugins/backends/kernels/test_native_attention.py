"""Attention of treadle-kernels-native against torch: rope, cache and softmax on every instruction set.

Pages lie in no order and are shared; prompts begin and end anywhere; rows that generate and pieces of
prompts are in one step.
"""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from treadle_kernels_native import library
from treadle_kernels_native.structs import Format, InstructionSet, Layer, Model, Step

# Where there is a compiler, a library that was not built is a failure of the build hook.
if library.missing_reason() is not None and shutil.which("cc") is None:
    pytest.skip(str(library.missing_reason()), allow_module_level=True)

LIBRARY = library.load_library()
SETS = library.instruction_sets(LIBRARY)
ROUNDING = (InstructionSet.AVX512_BF16, InstructionSet.AMX, InstructionSet.I8MM)
"""Those that multiply bf16 by bf16, so that queries are rounded."""
MAX_LEN, SLOTS, EPS = 320, 4, 1e-5
Rows = Sequence[tuple[int, int, int]]
"""Slot, tokens before, new tokens of each row."""
STEPS: tuple[tuple[Rows, int], ...] = (
    (((2, 0, 1),), 0),  # a prompt of one token
    (((2, 1, 70), (0, 0, 130)), 0),
    (((0, 130, 1), (2, 71, 1)), 2),
    (((2, 72, 1), (0, 131, 97), (3, 0, 33)), 1),
    (((3, 33, 1), (2, 73, 1), (0, 228, 1)), 3),
    (((1, 64, 20),), 0),  # behind a prefix that is another's
)
"""Rows of each step, and how many of them generate."""


class Case:
    """One attention layer with its cache, in the library and in torch."""

    def __init__(
        self,
        isa: InstructionSet,
        *,
        heads: int = 4,
        kv_heads: int = 2,
        d: int = 32,
        page: int = 16,
        window: int = 0,
        dtype: torch.dtype = torch.float32,
        norms: bool = False,
        threads: int = 2,
    ) -> None:
        g = torch.Generator().manual_seed(d + heads)
        self.isa, self.heads, self.kv_heads, self.d, self.page = isa, heads, kv_heads, d, page
        self.window, self.dtype = window, dtype
        pages = -(-MAX_LEN // page)
        order = torch.randperm(SLOTS * pages, generator=g).to(torch.int32) + 1
        self.table = order.view(SLOTS, pages).numpy()
        shared = min(64 // page, pages) if 64 % page == 0 else 0
        self.table[1, :shared] = self.table[0, :shared]
        self.shares = shared > 0
        # Whatever was not written must not matter.
        self.cache = torch.full((2, SLOTS * pages + 1, page, kv_heads, d), torch.nan, dtype=dtype)
        angles = torch.arange(MAX_LEN)[:, None] * 100.0 ** -(torch.arange(d // 2) / (d // 2))
        self.cos, self.sin = angles.cos(), angles.sin()
        self.norms = [1 + 0.2 * torch.randn(d, generator=g) for _ in range(2)] if norms else None
        self.scale = 1.3 * d**-0.5
        self.layer = Layer(
            q_norm=self.norms[0].data_ptr() if self.norms else None,
            k_norm=self.norms[1].data_ptr() if self.norms else None,
            cos=self.cos.data_ptr(),
            sin=self.sin.data_ptr(),
            keys=self.cache[0].data_ptr(),
            values=self.cache[1].data_ptr(),
            scale=self.scale,
            window=window,
        )
        form = Format.BFLOAT16 if dtype == torch.bfloat16 else Format.FLOAT32
        model = Model(
            hidden=32, heads=heads, kv_heads=kv_heads, head_size=d, intermediate=32, eps=EPS,
            cache_format=form, page_size=page,
        )  # fmt: skip
        self.engine = LIBRARY.tn_create(ctypes.byref(model), threads, isa, 0)
        width = (heads + 2 * kv_heads) * d
        self.tokens = torch.randn(SLOTS, MAX_LEN, width, generator=torch.manual_seed(d))
        if self.shares:
            self.tokens[1, :64] = self.tokens[0, :64]

    def close(self) -> None:
        LIBRARY.tn_destroy(self.engine)

    def run(self, rows: Rows, decodes: int) -> Tensor:
        """What the library makes of one step: ``[tokens, heads, d]``."""
        qkv = torch.cat([self.tokens[slot, start : start + count] for slot, start, count in rows])
        result = torch.full((len(qkv), self.heads, self.d), torch.nan)
        arrays = [np.array(column, dtype=np.int32) for column in zip(*rows, strict=True)]
        step = Step(
            *(array.ctypes.data for array in arrays),
            columns=self.table.shape[1],
            rows=len(rows),
            num_decodes=decodes,
        )
        step.samples = (samples := np.zeros(len(rows), dtype=np.uint8)).ctypes.data
        step.prompt_ids = (ids := np.zeros(len(qkv), dtype=np.int64)).ctypes.data
        step.tables[0] = self.table.ctypes.data
        LIBRARY.tn_attention_test(
            self.engine, self.layer, ctypes.byref(step), qkv.data_ptr(), result.data_ptr()
        )
        del samples, ids
        return result

    def expected(self, rows: Rows) -> Tensor:
        return torch.cat([self.reference(*row) for row in rows])

    def reference(self, slot: int, start: int, count: int) -> Tensor:
        """Of one row, in float64 from all of the sequence's tokens."""
        end, d = start + count, self.d
        q, k, v = (
            self.tokens[slot, :end]
            .double()
            .view(end, -1, d)
            .split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        )
        if self.norms:
            q, k = (
                F.rms_norm(x, (d,), weight.double(), EPS)
                for x, weight in zip((q, k), self.norms, strict=True)
            )
        q, k = (self.rotate(x, end) for x in (q, k))
        q = q[start:]
        if self.dtype == torch.bfloat16:
            k, v = (x.to(self.dtype).double() for x in (k, v))
            if self.isa in ROUNDING:
                q = q.to(self.dtype).double()
        k, v = (x.repeat_interleave(self.heads // self.kv_heads, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.scale
        distance = torch.arange(start, end)[:, None] - torch.arange(end)
        seen = (distance >= 0) & (distance < (self.window or MAX_LEN))
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v).float()

    def rotate(self, x: Tensor, end: int) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        cos, sin = (t[:end, None].double() for t in (self.cos, self.sin))
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


SHAPES: dict[str, dict[str, Any]] = {
    "pages of 16": {},
    "pages of 1, one kv head": {"page": 1, "kv_heads": 1},
    "pages of 7, window": {"page": 7, "window": 40},
    "pages of 64, norms": {"page": 64, "d": 64, "norms": True, "threads": 1},
    "pages of 7, five kv heads for two threads": {"page": 7, "heads": 10, "kv_heads": 5},
    "more kv heads than are taken together": {"heads": 64, "kv_heads": 32, "threads": 1},
    "pages of 32, a window of one": {"page": 32, "window": 1, "heads": 6},
    "long window, heads of 96": {"page": 16, "window": 100, "d": 96},
    "48 heads of one, heads of 128": {"heads": 48, "kv_heads": 1, "d": 128},
    "a kv head for each, heads of 256": {"heads": 2, "d": 256, "norms": True, "threads": 1},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_steps_equal_attention_in_torch(shape: dict[str, Any], dtype: torch.dtype) -> None:
    # In tiles the weights are rounded to bf16 as well.
    error = 2e-5 if dtype == torch.float32 else 2e-2
    for rounding in (False, True):
        expected: list[Tensor] = []
        for isa in (name for name in SETS if (name in ROUNDING) is rounding):
            case = Case(isa, dtype=dtype, **shape)
            steps = STEPS if case.shares else STEPS[:-1]
            expected = expected or [case.expected(rows) for rows, _ in steps]
            for (rows, decodes), values in zip(steps, expected, strict=True):
                torch.testing.assert_close(case.run(rows, decodes), values, atol=error, rtol=0)
            case.close()


@pytest.mark.parametrize("isa", SETS)
def test_what_is_cached_equals_what_torch_would_cache(isa: InstructionSet) -> None:
    """Keys that were normalised and turned, in the pages of their tokens and nowhere else."""
    case = Case(isa, norms=True, page=7)
    case.run(((2, 0, 20),), 0)
    stored = ~case.cache.isnan().flatten(3).any(-1)
    assert int(stored.sum()) == 2 * 20
    k = case.tokens[2, :20].view(20, -1, case.d)[:, case.heads : case.heads + case.kv_heads]
    assert case.norms is not None
    expected = case.rotate(F.rms_norm(k.double(), (case.d,), case.norms[1].double(), EPS), 20)
    pages = torch.from_numpy(case.table[2])[torch.arange(20) // 7]
    actual = case.cache[0, pages, torch.arange(20) % 7]
    torch.testing.assert_close(actual, expected.float(), atol=1e-5, rtol=0)
    case.close()


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("window", [0, 40])
def test_float32_does_not_depend_on_the_batch(isa: InstructionSet, window: int) -> None:
    """Equal bit by bit: alone or with others, in one piece or in many, with any threads and pages."""
    rows = ((0, 0, 150), (2, 0, 9), (3, 0, 70))
    together = Case(isa, window=window, page=16, threads=3)
    expected = together.run(rows, 0)[:150]
    for page, cuts in ((16, (150,)), (7, (1, 63, 64, 130, 150)), (64, tuple(range(10, 151, 10)))):
        case, start = Case(isa, window=window, page=page, threads=1), 0
        for end in cuts:
            generates = end - start == 1
            actual = case.run(((0, start, end - start),), int(generates))
            assert torch.equal(actual, expected[start:end]), (page, start, end)
            start = end
        case.close()
    last = together.run(((3, 70, 1), (0, 150, 1)), 2)[1:]
    together.close()
    alone = Case(isa, window=window, page=5, threads=1)
    assert torch.equal(alone.run(((0, 0, 151),), 0)[150:], last)
    alone.close()
