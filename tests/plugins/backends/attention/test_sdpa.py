"""What the suite of every backend does not say of this one."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from treadle_sdpa import sdpa, treadle_attention_backend
from treadle_sdpa.metadata import bias, width
from treadle_sdpa.sdpa import SdpaAttention

from treadle.api.attention import AttentionOffer, AttentionRequest, MaskKind, Refusal
from treadle.api.cache import DeviceInfo, KVCacheSpec
from treadle.testing.attention import AttentionCase
from treadle_paged_attention_kit import cache as storage

FLOAT32 = AttentionRequest(DeviceInfo("cpu"), "float32", "float32", 32, 4, 2, 32**-0.5)


def run(case: AttentionCase, cache: Tensor | None = None) -> Tensor:
    backend = SdpaAttention(case.request)
    cache = case.cache(backend) if cache is None else cache
    return backend.forward(case.q, case.k, case.v, cache, backend.build_metadata(case.batch))


def rows(case: AttentionCase, chosen: list[int]) -> AttentionCase:
    """The same sequences, in a batch of fewer."""
    part = AttentionCase(
        case.request,
        [case.query_lens[r] for r in chosen],
        [case.kv_lens[r] for r in chosen],
        case.page_size,
        device="cpu",
    )
    for name in ("queries", "keys", "values"):
        setattr(part, name, [getattr(case, name)[r] for r in chosen])
    return part


@pytest.mark.parametrize("window", [None, 20])
def test_float32_rows_do_not_depend_on_the_batch_bit_by_bit(window: int | None) -> None:
    request = replace(FLOAT32, window=window)
    torch.set_num_threads(1)
    case = AttentionCase(
        request, [1] * 6 + [5, 30], [3, 70, 600, 64, 65, 9, 5, 90], 16, device="cpu"
    )
    together = run(case)
    start = 0
    for row, count in enumerate(case.query_lens):
        assert torch.equal(run(rows(case, [row])), together[start : start + count]), f"row {row}"
        start += count


def test_splitting_rows_into_units_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    case = AttentionCase(FLOAT32, [1] * 3, [100, 90, 120], 16, device="cpu")
    expected = run(case)
    monkeypatch.setattr(sdpa, "_UNIT_BYTES", 128 * 32 * 4 * 4)  # 4 of the 6 units at a time
    assert torch.equal(run(case), expected)


@pytest.mark.parametrize(
    "request_", [FLOAT32, replace(FLOAT32, window=9), replace(FLOAT32, softcap=3.0)]
)
def test_a_prompt_in_blocks_is_the_prompt(
    request_: AttentionRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = AttentionCase(request_, [70, 33], [70, 90], 16, device="cpu")
    monkeypatch.setattr(sdpa, "_SCORE_BYTES", 1)  # the least block, 16 queries
    case.check(run(case))


@pytest.mark.parametrize("window", [None, 9])
def test_garbage_of_other_sequences_is_never_read(window: int | None) -> None:
    """A NaN left in a recycled page, or in page 0, must stay where it is."""
    for dtype in ("float32", "bfloat16", "float16"):
        request = replace(FLOAT32, dtype=dtype, kv_dtype=dtype, window=window)
        case = AttentionCase(request, [1, 1, 4, 9], [5, 70, 21, 9], 16, device="cpu")
        cache = case.cache(SdpaAttention(request))
        cache[cache == 7.0] = float("nan")  # what Case puts where it has written nothing
        case.check(run(case, cache), dtype)


def test_bfloat16_scores_are_not_rounded_to_bfloat16() -> None:
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU has no bfloat16 products")
    backend = SdpaAttention(replace(FLOAT32, dtype="bfloat16", kv_dtype="bfloat16", scale=1.0))
    assert backend.compute == torch.bfloat16
    q = (torch.randn(2, 5, 128) * 2).bfloat16()
    k = (torch.randn(2, 64, 128) * 2).bfloat16()
    exact = q.double() @ k.double().transpose(1, 2)
    assert exact.abs().max() > 30
    rounded = (torch.bmm(q, k.transpose(1, 2)).double() - exact).abs().max()
    error = (backend._scores(q, k, None).double() - exact).abs().max()
    assert error < 2e-3 < 0.05 < rounded


def test_a_cpu_without_bfloat16_products_computes_in_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    case = AttentionCase(
        replace(FLOAT32, dtype="bfloat16", kv_dtype="bfloat16"),
        [1, 1, 8],
        [9, 40, 20],
        16,
        device="cpu",
    )
    assert SdpaAttention(case.request).compute == torch.float32
    case.check(run(case))


@pytest.mark.parametrize(("name", "limit"), [("fp8_e4m3", 448.0), ("fp8_e5m2", 57344.0)])
def test_fp8_saturates_where_a_cast_would_overflow(name: str, limit: float) -> None:
    dtype = storage.DTYPES[name]
    cache = torch.zeros(2, 3, 4, 2, 8).to(dtype)
    k = torch.full((2, 2, 8), 1e6)
    storage.write_kv(cache, k, -k, torch.tensor([4, 11]))
    actual = cache.float().flatten(1, 2)
    assert (actual[0, [4, 11]] == limit).all() and (actual[1, [4, 11]] == -limit).all()
    assert actual.count_nonzero() == 4 * 16, "wrote beside its slots"


def test_fp8_reads_back_what_it_stored_however_the_prompt_was_cut() -> None:
    request = replace(FLOAT32, kv_dtype="fp8_e4m3")
    full = AttentionCase(request, [20], [20], 16, device="cpu", seed=3)
    part = AttentionCase(request, [6], [20], 16, device="cpu", seed=3)
    part.keys, part.values = full.keys, full.values
    part.queries = [full.queries[0][-6:]]
    torch.testing.assert_close(run(part), run(full)[-6:], rtol=1e-6, atol=1e-6)


def test_the_width_of_a_row_is_its_own() -> None:
    assert [width(n) for n in (1, 64, 65, 512, 513, 1024, 1025)] == [
        64,
        64,
        128,
        512,
        768,
        1024,
        1280,
    ]
    assert all(n <= width(n) < 2 * n for n in range(64, 5000))


def test_bias_against_its_definition() -> None:
    for cached, window in ((0, None), (5, None), (5, 3), (0, 1), (9, 100)):
        lo = 0 if window is None else max(0, cached - window + 1)
        actual = bias(4, cached, lo, cached + 4, window, torch.device("cpu"))
        for i in range(4):
            for j in range(lo, cached + 4):
                query_pos = cached + i
                visible = j <= query_pos and (window is None or j > query_pos - window)
                assert actual[i, j - lo] == (0.0 if visible else float("-inf")), (
                    cached,
                    window,
                    i,
                    j,
                )


def test_every_reason_is_given_at_once() -> None:
    offer = treadle_attention_backend(
        replace(FLOAT32, device=DeviceInfo("abacus"), mask=MaskKind.TREE, latent=True),
        {},
    )
    assert isinstance(offer, Refusal) and len(offer.reasons) == 3
    assert "abacus" in offer.reasons[0] and "tree" in offer.reasons[1]


def test_on_cuda_it_is_the_last_resort() -> None:
    offer = treadle_attention_backend(replace(FLOAT32, device=DeviceInfo("cuda", (9, 0))), {})
    assert isinstance(offer, AttentionOffer) and offer.score == 10 and not offer.graph_safe


def test_the_cache_is_pages_of_tokens() -> None:
    spec = KVCacheSpec("layer", 2, 32, "float32")
    assert SdpaAttention(FLOAT32).kv_cache_shape(7, 16, spec) == (2, 7, 16, 2, 32)
