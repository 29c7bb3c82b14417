"""The Triton backend without a GPU: its offers, its choices, its kernels interpreted and compiled."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from treadle_attention_triton import PAGE_SIZES, tiles, treadle_attention_backend
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as build

from treadle.api.attention import AttentionOffer, AttentionRequest, MaskKind, Refusal
from treadle.api.cache import DeviceInfo
from treadle.testing.attention import AttentionSuite

pytestmark = pytest.mark.early

HOPPER = DeviceInfo("cuda", (9, 0))
QWEN = AttentionRequest(HOPPER, "bfloat16", "bfloat16", 128, 16, 8, 128**-0.5)
GPT_OSS = AttentionRequest(
    HOPPER, "bfloat16", "bfloat16", 64, 64, 8, 0.125, mask=MaskKind.SLIDING, window=128, sinks=True
)
HERE = Path(__file__).parent


def refusal(**changes: Any) -> tuple[str, ...]:
    offer = treadle_attention_backend(replace(QWEN, **changes), {})
    assert isinstance(offer, Refusal)
    return offer.reasons


# ------------------------------------------------------------------------------- the offer


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_it_offers_from_capability_8_on(capability: tuple[int, int]) -> None:
    offer = treadle_attention_backend(replace(QWEN, device=DeviceInfo("cuda", capability)), {})
    assert isinstance(offer, AttentionOffer)
    assert offer.score >= 80 and offer.graph_safe and offer.page_sizes == PAGE_SIZES


def test_it_refuses_with_every_reason() -> None:
    assert refusal(device=DeviceInfo("cpu")) == ("device 'cpu' is not CUDA",)
    assert "7.5 is below 8.0" in refusal(device=DeviceInfo("cuda", (7, 5)))[0]
    reasons = refusal(head_size=100, num_heads=7, page_size=48, latent=True, mask=MaskKind.TREE)
    assert len(reasons) == 5
    assert "8.9" in refusal(device=DeviceInfo("cuda", (8, 0)), kv_dtype="fp8_e4m3")[0]
    assert isinstance(
        treadle_attention_backend(replace(QWEN, kv_dtype="fp8_e4m3"), {}), AttentionOffer
    )
    assert (
        refusal(num_heads=128, num_kv_heads=1)
        and refusal(window=0)
        and refusal(mask=MaskKind.SLIDING)
    )


# --------------------------------------------------------------------------- the choices


def test_splits_fill_the_device_and_stay_bounded() -> None:
    def splits(rows: int, tokens: int, kv_heads: int = 8) -> int:
        return tiles.choose_num_splits(rows, kv_heads, -(-tokens // 64), 132)

    assert [splits(1, n) for n in (1, 256, 300, 1024, 4096, 10**6)] == [1, 1, 16, 16, 16, 16]
    assert splits(1, 10**6, kv_heads=1) == 64, "16 programs would leave 116 multiprocessors idle"
    assert splits(8, 1024) == 4
    assert splits(32, 4096) == splits(256, 4096) == 1
    for rows in range(1, 300, 7):
        assert rows * 8 * splits(rows, 10**5) <= 2 * 132 or splits(rows, 10**5) == 1


def test_tiles_hold_a_group_and_divide_pages() -> None:
    for group in (1, 2, 3, 7, 8, 16, 33, 64):
        for size in (16, 64, 80, 96, 128, 256):
            for itemsize in (2, 4):
                decode = tiles.decode_tile(group, size, itemsize)
                assert decode.block_m >= group
                for queries in (2, 5, 100, 4096):
                    prefill = tiles.prefill_tile(queries, group, size, itemsize, queries)
                    assert prefill.block_m // group >= 1
                    for tile in (decode, prefill):
                        assert all(
                            p % tile.block_n == 0 or tile.block_n % p == 0 for p in PAGE_SIZES
                        )


# --------------------------------------------------------------------------- the kernels


@pytest.mark.parametrize(
    "chosen", ["not slow", pytest.param("slow or not slow", marks=pytest.mark.slow)]
)
def test_the_kernels_in_the_interpreter(chosen: str) -> None:
    """Those of interpreted_attention_triton.py, in a process whose Triton interprets."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", chosen]
    # Of Triton 3.6 with numpy 1.26.
    command += ["-W", "ignore:Conversion of an array:DeprecationWarning"]
    process = subprocess.run(
        [*command, str(HERE / "interpreted_attention_triton.py")],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-4000:] + process.stderr[-2000:]
    assert " passed" in process.stdout


TYPES = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32"}
TYPES |= {"fp8_e4m3": "*fp8e4nv", "fp8_e5m2": "*fp8e5"}


def compiled(request: AttentionRequest, queries: int, page_size: int = 64, splits: int = 1) -> Any:
    """The kernel that ``request`` needs on Hopper: decode for one query token, else prefill."""
    from treadle_attention_triton.decode import decode_kernel
    from treadle_attention_triton.prefill import prefill_kernel

    group, size = request.num_heads // request.num_kv_heads, request.head_size
    itemsize = getattr(torch, request.dtype).itemsize
    constants: dict[str, Any] = {
        "NUM_KV_HEADS": request.num_kv_heads,
        "GQA_GROUP": group,
        "HEAD_DIM": size,
        "HEAD_DIM_PADDED": tiles.next_power_of_2(size),
        "PAGE_SIZE": page_size,
        "SLIDING_WINDOW": request.window or 0,
        "CAUSAL": True,
        "HAS_SOFTCAP": request.softcap is not None,
        "HAS_SINKS": request.sinks,
        "FP8_CACHE": request.kv_dtype.startswith("fp8"),
        "INPUT_PRECISION": "ieee" if request.dtype == "float32" else "tf32",
    }
    if queries == 1:
        kernel, tile = (
            decode_kernel,
            tiles.decode_tile(group, size, itemsize),
        )
        constants |= {
            "BLOCK_M": tile.block_m,
            "NUM_SPLITS": splits,
            "MAX_QUERIES": 1,
            "USE_PDL": True,
        }
        if splits == 1:  # as the backend passes them
            constants |= dict.fromkeys(("partial_out", "partial_lse"))
    else:
        narrow = request.kv_dtype.startswith("fp8")
        tile = tiles.prefill_tile(queries, group, size, itemsize, queries, narrow)
        kernel = prefill_kernel
        constants |= {"BLOCK_M": tile.block_m}
    constants["BLOCK_N"] = tile.block_n
    types = {"q": TYPES[request.dtype], "out": TYPES[request.dtype]}
    types |= {"cache": TYPES[request.kv_dtype], "partial_out": "*fp32", "partial_lse": "*fp32"}
    types |= dict.fromkeys(
        ("page_table", "seq_lens", "query_start_loc", "tile_list", "row_indices"), "*i32"
    )
    types |= dict.fromkeys(("q_stride", "page_table_stride"), "i32")
    types |= {"sinks": "*fp32"} if request.sinks else {}
    constants |= {} if request.sinks else {"sinks": None}
    types |= {"v_offset": "i64", "scale": "fp32", "softcap": "fp32", "v_scale": "fp32"}
    names = kernel.arg_names
    source = ASTSource(
        kernel,
        signature={n: "constexpr" if n in constants else types[n] for n in names},
        constexprs={(names.index(n),): value for n, value in constants.items()},
        # What a launch finds out of its arguments: allocations and strides are multiples of 16.
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, n in enumerate(names)
            if n in types
            and n not in constants
            and (types[n][0] == "*" or n in ("q_stride", "v_offset"))
        },
    )
    options: dict[str, Any] = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    if tile.max_registers:
        options["maxnreg"] = tile.max_registers
    return build(source, target=GPUTarget("cuda", 90, 32), options=options)


VARIANTS: dict[str, tuple[AttentionRequest, int]] = {
    "decode": (QWEN, 1),
    "decode, group of 64": (replace(QWEN, num_heads=64, num_kv_heads=1), 1),
    "decode, 256": (replace(QWEN, head_size=256), 1),
    "decode, 80": (replace(QWEN, head_size=80), 1),
    "decode, fp8": (replace(QWEN, kv_dtype="fp8_e4m3"), 1),
    "decode, float32": (replace(QWEN, dtype="float32", kv_dtype="float32"), 1),
    "prefill": (QWEN, 2048),
    "prefill, float16, 64": (
        replace(QWEN, dtype="float16", kv_dtype="float16", head_size=64),
        2048,
    ),
    "prefill, 256": (replace(QWEN, head_size=256), 2048),
    "prefill, fp8": (replace(QWEN, kv_dtype="fp8_e5m2"), 2048),
    "prefill, window and soft cap": (replace(QWEN, window=4096, softcap=50.0), 2048),
    "few queries": (QWEN, 5),
    "decode, sinks": (GPT_OSS, 1),
    "prefill, sinks": (GPT_OSS, 2048),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_kernels_compile_for_hopper_and_fit(name: str) -> None:
    request, queries = VARIANTS[name]
    kernel = compiled(request, queries)
    assert kernel.metadata.shared <= 227 * 1024
    code = kernel.asm["ptx"]
    assert ("griddepcontrol.wait" in code) == (queries == 1), "only decode starts early"
    if request.dtype != "float32":
        # Keys and values arrive asynchronously, 16 bytes a thread; products are on tensor cores.
        assert "cp.async.cg" in code
        assert "wgmma" in code if queries > 5 else "mma" in code


def test_splits_and_small_pages_compile_too() -> None:
    assert compiled(QWEN, 1, page_size=16, splits=32).metadata.shared <= 227 * 1024
    assert compiled(QWEN, 2048, page_size=16).metadata.shared <= 227 * 1024


# -------------------------------------------------------------------------------- a card


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnCuda(AttentionSuite):
    key = "triton"
    device = DeviceInfo(
        "cuda", torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    )

    def offer_or_refusal(self, request: AttentionRequest) -> AttentionOffer | Refusal:
        return treadle_attention_backend(request, {})


def test_others_may_write_its_cache() -> None:
    """Without this the fused norm, rotary embedding and cache write is never installed."""
    from treadle_attention_triton.backend import TritonAttention

    from treadle.api.attention import SupportsExternalKVWrite

    request = AttentionRequest(
        DeviceInfo("cuda", (9, 0)),
        "bfloat16",
        "bfloat16",
        head_size=64,
        num_heads=4,
        num_kv_heads=2,
        scale=0.125,
    )
    assert isinstance(TritonAttention(request, num_sms=132), SupportsExternalKVWrite)
