"""The kernels in Triton's interpreter, on CPU tensors: run by test_attention_triton.py.

The interpreter is chosen when triton is imported, for the whole process, hence a process of its own.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import interpreter  # noqa: F401 - before kernels
import pytest
import torch
from torch import Tensor
from treadle_attention_triton import tiles, treadle_attention_backend
from treadle_attention_triton.backend import TritonAttention, TritonMetadata

from treadle.api.attention import (
    AttentionBackend,
    AttentionOffer,
    AttentionRequest,
    MaskKind,
    Refusal,
)
from treadle.api.cache import DeviceInfo
from treadle.testing.attention import AttentionCase, AttentionSuite, requests, steps

HOPPER = DeviceInfo("cuda", (9, 0))


class Interpreted(TritonAttention):
    """Attends, and writes by its own kernel, for queries that are not zero only.

    A case fills its cache by a forward pass whose queries are zero and whose result nobody reads;
    most of the time of the interpreter would go into that.
    """

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        cache: Tensor,
        metadata: TritonMetadata,
        scales: tuple[float, float] = (1.0, 1.0),
        *,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if q.any() or k is None or v is None:
            return super().forward(q, k, v, cache, metadata, scales, sinks=sinks)
        stored = torch.stack((k / scales[0], v / scales[1])).to(cache.dtype)
        cache.flatten(1, 2)[:, metadata.batch.slot_mapping] = stored
        return torch.zeros_like(q)


def on_cpu(request: AttentionRequest) -> Callable[[], AttentionBackend]:
    """A device of 4 processors, so that few rows are already worth splitting."""
    return lambda: Interpreted(request, num_sms=4)


QUICK = {
    "float32",
    "one kv head",
    "head size 80",
    "narrow window",
    "sinks and window",
    "bidirectional",
}


class TestInterpreted(AttentionSuite):
    key = "triton"
    # Fewer and shorter rows than elsewhere: the interpreter takes seconds for those.
    steps = {
        "first token": steps["first token"],
        "decodes": ([1] * 3, [1, 17, 70]),
        "last tokens": ([5, 1], [5, 150]),
        "mixed": ([1, 1, 6, 3], [50, 2, 6, 35]),
    }

    def offer_or_refusal(self, request: AttentionRequest) -> AttentionOffer | Refusal:
        if request.dtype == "bfloat16":
            return Refusal("triton", ("the interpreter's bfloat16 products are wrong",))
        device = HOPPER if request.device.type == "cpu" else request.device
        offer = treadle_attention_backend(replace(request, device=device), {})
        return (
            replace(offer, create=on_cpu(request)) if isinstance(offer, AttentionOffer) else offer
        )

    @pytest.mark.parametrize(
        "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in requests]
    )
    def test_every_step_is_what_the_reference_says(self, name: str) -> None:
        super().test_every_step_is_what_the_reference_says(name)


def run(case: AttentionCase, cache: Tensor | None = None) -> Tensor:
    backend = Interpreted(case.request, num_sms=4)
    cache = case.cache(backend) if cache is None else cache
    return backend.forward(case.q, case.k, case.v, cache, backend.build_metadata(case.batch))


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("window", [None, 9])
def test_garbage_of_other_sequences_is_never_read(window: int | None, page_size: int) -> None:
    request = replace(requests["float32"], window=window)
    case = AttentionCase(request, [1, 1, 4, 9], [5, 70, 21, 9], page_size, device="cpu")
    cache = case.cache(Interpreted(request, num_sms=4))
    cache[cache == 7.0] = float("nan")  # what Case puts where it has written nothing
    case.check(run(case, cache))


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.3, 0.02)])
@pytest.mark.parametrize(("name", "limit"), [("fp8_e4m3", 448.0), ("fp8_e5m2", 57344.0)])
def test_fp8_caches_are_read_and_saturate(
    name: str, limit: float, scales: tuple[float, float]
) -> None:
    """What is read is stored by torch: the interpreter loses the carry when it rounds to fp8."""
    request = replace(requests["float16"], kv_dtype=name)
    key, value = scales
    for lengths in (([1, 1], [5, 70]), ([3, 20], [40, 20])):
        case = AttentionCase(request, *lengths, 64, device="cpu")
        backend = Interpreted(request, num_sms=4)
        cache = case.cache(backend)
        for row, tokens in enumerate(case.kv_lens):
            pages = case.batch.page_table[row, : -(-tokens // 64)].long()
            stored = torch.stack((case.keys[row], case.values[row])).to(cache.dtype)
            for pos in range(tokens):
                cache[:, pages[pos // 64], pos % 64] = stored[:, pos]
            case.keys[row], case.values[row] = stored[0].float() * key, stored[1].float() * value
        plan = backend.build_metadata(case.batch)
        out = backend.forward(case.q, None, None, cache, plan, scales)
        assert (out.float() - case.expected()).norm() <= 2e-3 * case.expected().norm()
    new = case.batch.slot_mapping
    k, v = (x.sign().half() for x in (case.k, case.v))
    backend.forward(case.q, k * (1.5 * key), v * (1.5 * value), cache, plan, scales)
    written = cache.float().flatten(1, 2)[:, new]
    torch.testing.assert_close(written, torch.stack((k, v)).float() * 1.5, rtol=0.13, atol=0.0)
    backend.forward(case.q, case.k * 60000, case.v * 60000, cache, plan, scales)
    assert torch.isfinite(cache.float()).all(), "too large a value became NaN"
    assert cache.float().max() == limit


@pytest.mark.parametrize("splits", [2, 3, 8])
@pytest.mark.parametrize("window", [None, 200])
def test_every_number_of_splits_gives_the_same(
    splits: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "choose_num_splits", lambda *_: splits)
    request = replace(requests["float32"], window=window, num_heads=2, num_kv_heads=1)
    case = AttentionCase(request, [1] * 3, [400, 1, 129], 64, device="cpu")
    case.check(run(case), f"{splits} splits")


def test_a_row_of_no_tokens_is_padding() -> None:
    """Captured batches are padded with rows of length 0: zeros, whatever the page table says."""
    for processors in (1, 64):
        backend = Interpreted(requests["float32"], num_sms=processors)
        case = AttentionCase(requests["float32"], [1, 1], [300, 200], 64, device="cpu")
        cache = case.cache(backend)
        plan = backend.build_metadata(case.batch)
        assert (plan.split_batches[0].num_splits > 1) == (processors == 64)
        case.batch.seq_lens[1] = 0
        out = backend.forward(case.q, case.k, case.v, cache, plan)
        assert (out[1] == 0).all()
        torch.testing.assert_close(out[0], case.expected()[0], rtol=1e-4, atol=1e-4)


def test_a_negative_slot_is_not_stored() -> None:
    backend = Interpreted(requests["float32"], num_sms=4)
    case = AttentionCase(requests["float32"], [1, 1], [3, 5], 16, device="cpu")
    cache = case.cache(backend)
    before = cache.clone()
    case.batch.slot_mapping[1] = -1
    backend.forward(case.q, case.k, case.v, cache, backend.build_metadata(case.batch))
    changed = (cache != before).flatten(3).any(-1).flatten(1).sum(1)
    assert changed.tolist() == [1, 1]


@pytest.mark.parametrize("rows", [16, 32, 128])
def test_every_height_of_tile(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "prefill_tile", lambda *_: tiles.Tile(rows, 64, 4, 2))
    case = AttentionCase(requests["float32"], [9, 30, 2], [75, 30, 130], 64, device="cpu")
    case.check(run(case), f"{rows} rows")


def test_groups_that_are_no_power_of_two() -> None:
    for heads, kv_heads in ((6, 2), (5, 1)):
        request = replace(requests["float32"], num_heads=heads, num_kv_heads=kv_heads)
        case = AttentionCase(request, [1, 1, 50], [70, 3, 90], 64, device="cpu")
        case.check(run(case), f"{heads}/{kv_heads}")


@pytest.mark.parametrize(
    "changes", [{}, {"window": 200}, {"mask": MaskKind.BIDIRECTIONAL}], ids=["", "window", "all"]
)
def test_drafts_are_split_too(changes: dict[str, Any]) -> None:
    """Few new tokens over many keys: more programs than tiles of queries would give."""
    request = replace(requests["float32"], **changes)
    backend = Interpreted(request, num_sms=64)
    case = AttentionCase(request, [1, 5, 3, 20], [150, 290, 130, 40], 64, device="cpu")
    cache, plan = case.cache(backend), backend.build_metadata(case.batch)
    assert [(i.num_rows, i.max_query_len) for i in plan.split_batches] == [
        (1, 1),
        (2, 8),
    ] and plan.tile_list is not None
    assert all(i.num_splits > 1 for i in plan.split_batches)
    case.check(backend.forward(case.q, case.k, case.v, cache, plan))
