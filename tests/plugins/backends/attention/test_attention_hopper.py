"""Hopper's kernel for prompts: what it serves, its tiles, its code; on a card, its results."""

import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip("triton.experimental.gluon")

from treadle_attention_triton.backend import TritonAttention, create
from treadle_attention_triton.hopper.prefill import (
    BLOCK_M,
    HopperPrefill,
    supports,
)

from treadle.api.attention import AttentionRequest, MaskKind
from treadle.api.cache import DeviceInfo
from treadle.testing.attention import AttentionCase
from treadle.testing.attention_reference import batch_of

HOPPER = DeviceInfo("cuda", (9, 0))
QWEN = AttentionRequest(HOPPER, "bfloat16", "bfloat16", 128, 16, 8, 128**-0.5)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": "float16", "kv_dtype": "float16"},
        {"num_heads": 8},
        {"num_heads": 64, "num_kv_heads": 1},
    ],
)
def test_it_serves_16_bits_on_hopper(changes: dict[str, Any]) -> None:
    assert supports(replace(QWEN, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"device": DeviceInfo("cuda", (8, 0))},
        {"device": DeviceInfo("cuda", (10, 0))},
        {"dtype": "float32", "kv_dtype": "float32"},
        {"kv_dtype": "fp8_e4m3"},
        {"head_size": 64},
        {"window": 500, "mask": MaskKind.SLIDING},
        {"window": 500},
        {"mask": MaskKind.BIDIRECTIONAL},
        {"softcap": 30.0},
        {"page_size": 128},
        {"num_heads": 24},  # three heads share keys
    ],
)
def test_it_leaves_the_rest_to_triton(changes: dict[str, Any]) -> None:
    assert not supports(replace(QWEN, **changes))


def test_where_it_does_not_work_triton_serves(
    fails: Callable[..., bool], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treadle_attention_triton.hopper.prefill._self_check", fails)
    backend = TritonAttention(QWEN, 132, hopper_prefill=HopperPrefill(QWEN, 132))
    decodes, _ = batch_of([1, 1], [90, 7], page_size=64)
    prompt, _ = batch_of([300], [300], page_size=64)
    with caplog.at_level(logging.WARNING):
        backend.build_metadata(decodes)
        assert not caplog.text, "nothing was tried"
        assert backend.build_metadata(prompt).tile is not None
        assert "Triton's serves them" in caplog.text
        caplog.clear()
        assert backend.build_metadata(prompt).tile is not None
        assert not caplog.text, "it is tried once"


def test_tiles_cover_every_token_once_and_begin_with_the_longest() -> None:
    query_lens, kv_lens = [1, 1, 300, 64, 70, 1000], [90, 7, 1300, 64, 70, 1000]
    batch, _ = batch_of(query_lens, kv_lens, page_size=64)
    tiles = HopperPrefill(QWEN, 132).build_work_items(batch, [2, 3, 4, 5])
    tokens: list[int] = []
    for row, token, real, position, length in tiles:
        assert 0 < real <= BLOCK_M // 2
        assert length == kv_lens[row]
        begin = sum(query_lens[:row])
        assert position == length - query_lens[row] + token - begin
        tokens += range(token, token + real)
    assert sorted(tokens) == list(range(2, sum(query_lens)))
    keys = [position + real for _, _, real, position, _ in tiles]
    assert all(a >= b for a, b in pairwise(keys))


def test_a_step_takes_it_where_rows_fill_its_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle_attention_triton.hopper.prefill._self_check", lambda *_: True)

    def planned(query_lens: list[int], page_size: int = 64, **options: Any) -> Any:
        batch, _ = batch_of(query_lens, query_lens, page_size=page_size)
        return TritonAttention(QWEN, 132, **options).build_metadata(batch)

    with_it = {"hopper_prefill": HopperPrefill(QWEN, 132)}
    long = planned([1, 9, 200], **with_it)
    assert long.tile is None and long.tile_list.shape == (5, 5), "of every row that has no items"
    assert planned([1, 9, 200]).tile is not None
    assert planned([1, 9, 20], **with_it).tile is not None
    assert planned([1, 9, 200], page_size=128, **with_it).tile is not None
    assert planned([1, 1], **with_it).tile_list is None


@pytest.mark.parametrize(
    ("group", "kind"),
    [
        pytest.param(1, "bf16", marks=pytest.mark.slow),
        (4, "bf16"),
        pytest.param(16, "fp16", marks=pytest.mark.slow),
    ],
)
def test_it_compiles_without_spills(group: int, kind: str, for_hopper: Callable[..., str]) -> None:
    from treadle_attention_triton.hopper.kernel import REGISTERS, WARPS, hopper_prefill_kernel
    from triton.experimental.gluon import language as gl

    def described(shape: list[int]) -> str:
        return f"tensordesc<{kind}{shape},{gl.NVMMASharedLayout(128, 16, len(shape))!r}>"

    types = {"q_desc": described([64 // group, group, 64]), "kv_desc": described([64, 64])}
    types |= {"out": "*i32", "page_table": "*i32", "work_items": "*i32", "qk_scale": "fp32"}
    aligned = ("out", "page_table", "work_items", "v_row_offset")
    constants = {"NUM_KV_HEADS": 8, "GQA_GROUP": group}
    options = {"num_warps": WARPS, "maxnreg": REGISTERS}
    ptx = for_hopper(hopper_prefill_kernel, constants, types, aligned, **options)
    assert ptx.count("wgmma.mma_async") == 96


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
class TestOnHopper:
    @pytest.mark.parametrize("heads", [8, 16, 32, 128])
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    @pytest.mark.parametrize(
        ("query_lens", "kv_lens"),
        [
            ([128], [128]),
            ([513, 64, 1000], [513, 64, 1000]),
            ([77, 130, 1], [300, 1025, 65]),
            ([1, 1, 40, 257, 2], [900, 2, 40, 1025, 777]),
            ([200] * 40, [200 + 13 * i for i in range(40)]),
        ],
    )
    def test_results(
        self, heads: int, dtype: str, query_lens: list[int], kv_lens: list[int]
    ) -> None:
        request = replace(QWEN, dtype=dtype, kv_dtype=dtype, num_heads=heads)
        backend = create(request)
        assert backend.hopper_prefill is not None
        case = AttentionCase(request, query_lens, kv_lens, 64, device="cuda")
        cache = case.cache(backend)
        cache[cache == 7.0] = float("nan")  # whatever nobody wrote
        plan = backend.build_metadata(case.batch)
        assert plan.tile_list is not None and plan.tile is None
        actual = backend.forward(case.q, case.k, case.v, cache, plan).double()
        expected = case.expected().double()
        assert (actual - expected).norm() < 1e-2 * expected.norm()
