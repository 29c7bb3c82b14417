"""xformers' own split-K kernel in Triton's interpreter, on CPU tensors: run by
test_attention_xformers.py, in a process of its own with the environment that this takes.

FlashAttention is CUDA only. In its place stands a reference of the same signature, so that all that
leads to it is as on a card: gathering, biases, and xformers' translation of them.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import interpreter  # noqa: F401 - before kernels
import pytest
import torch
from torch import Tensor
from treadle_attention_xformers import backend as module
from treadle_attention_xformers import treadle_attention_backend
from treadle_attention_xformers.backend import XformersAttention, splits
from xformers.ops.fmha import flash, triton_splitk

from treadle.api.attention import (
    AttentionBackend,
    AttentionOffer,
    AttentionRequest,
    MaskKind,
    Refusal,
)
from treadle.api.cache import DeviceInfo
from treadle.testing.attention import AttentionCase, AttentionSuite, requests, steps
from treadle.testing.attention_reference import attend

HOPPER = DeviceInfo("cuda", (9, 0))


def flash_forward(
    query: Tensor,  # [queries, heads, head_size]
    key: Tensor,  # [keys, kv_heads, head_size]
    value: Tensor,
    starts_q: Tensor,  # int32 [rows + 1]
    starts_k: Tensor,
    used_k: None,
    max_q: int,
    max_k: int,
    dropout: float,
    scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    return_softmax: bool,
    block_tables: None,
) -> tuple[Tensor, None, None]:
    """``torch.ops.xformers_flash.flash_fwd`` of packed rows, masked from the bottom right."""
    assert (dropout, window_left, window_right) == (0.0, -1, -1)
    assert starts_q.dtype == starts_k.dtype == torch.int32
    lengths_q, lengths_k = starts_q.diff().tolist(), starts_k.diff().tolist()
    assert (max(lengths_q), max(lengths_k)) == (max_q, max_k)
    rows = zip(query.split(lengths_q), key.split(lengths_k), value.split(lengths_k), strict=True)
    mask = MaskKind.CAUSAL if causal else MaskKind.BIDIRECTIONAL
    return torch.cat([attend(*row, scale=scale, mask=mask) for row in rows]), None, None


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash.FwOp, "OPERATOR", flash_forward)


class TestInterpreted(AttentionSuite):
    key = "xformers"
    # Shorter rows than elsewhere: the interpreter takes seconds for those.
    steps = {
        **{name: steps[name] for name in ("one decode", "first token", "prompts", "prefix hit")},
        "decodes": ([1] * 3, [1, 17, 70]),
        "chunk": ([10], [45]),
        "last tokens": ([5, 1], [5, 150]),
        "mixed": ([1, 1, 6, 3], [50, 2, 6, 35]),
    }

    def offer_or_refusal(self, request: AttentionRequest) -> AttentionOffer | Refusal:
        """As on a card; but float32 too, for a sharper comparison, and no bfloat16."""
        adapted = request
        if request.device.type == "cpu":
            adapted = replace(request, device=HOPPER)
        if request.dtype == "bfloat16":
            return Refusal("xformers", ("the interpreter's bfloat16 products are wrong",))
        if request.head_size == 128:
            return Refusal("xformers", ("xformers asks the device which warps are best",))
        if request.dtype == "float32":
            kv_dtype = "float16" if request.kv_dtype == "float32" else request.kv_dtype
            adapted = replace(adapted, dtype="float16", kv_dtype=kv_dtype)
        offer = treadle_attention_backend(adapted, {})
        if isinstance(offer, Refusal):
            return offer

        def create() -> AttentionBackend:
            return XformersAttention(request)

        return replace(offer, create=create)


def run(case: AttentionCase, cache: Tensor | None = None) -> Tensor:
    backend = XformersAttention(case.request)
    cache = case.cache(backend) if cache is None else cache
    return backend.forward(case.q, case.k, case.v, cache, backend.build_metadata(case.batch))


@pytest.mark.parametrize("page_size", [16, 64, 128])
def test_garbage_of_other_sequences_is_never_read(page_size: int) -> None:
    case = AttentionCase(
        requests["float32"], [1, 1, 1, 4, 9], [5, 64, 150, 21, 9], page_size, device="cpu"
    )
    cache = case.cache(XformersAttention(case.request))
    cache[cache == 7.0] = float("nan")  # what Case puts where it has written nothing
    case.check(run(case, cache))


@pytest.mark.parametrize("count", [2, 4, 64])
def test_every_number_of_splits_gives_the_same(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "splits", lambda *_: count)
    request = replace(requests["float32"], num_heads=2, num_kv_heads=1)
    case = AttentionCase(request, [1] * 3, [400, 1, 129], 64, device="cpu")
    case.check(run(case), f"{count} splits")


def test_a_long_row_is_split() -> None:
    case = AttentionCase(requests["float32"], [1, 1], [1100, 30], 64, device="cpu")
    plan = XformersAttention(case.request).build_metadata(case.batch)
    assert plan.decodes is not None and plan.decodes.operator.SPLIT_K > 1
    case.check(run(case))


def test_splits_are_bounded() -> None:
    assert [splits(8, n) for n in (16, 128, 300, 4096, 10**6)] == [1, 1, 2, 32, 64]
    assert splits(256 * 8, 10**6) == 1 and splits(10**6, 10**6) == 1
    for units in range(1, 5000, 7):
        assert units * splits(units, 10**6) <= 2048 or splits(units, 10**6) == 1


def test_rows_and_pages_are_padded_to_powers_of_two() -> None:
    """Else every number of rows, and of pages of the longest, would be compiled anew."""
    for rows, tokens, shape in ((1, 16, (1, 1)), (3, 33, (4, 4)), (8, 64, (8, 4))):
        case = AttentionCase(requests["float32"], [1] * rows, [tokens] * rows, 16, device="cpu")
        plan = XformersAttention(case.request).build_metadata(case.batch)
        assert plan.decodes is not None
        assert (plan.decodes.padded_rows, plan.decodes.padded_columns) == shape


def test_a_row_of_no_tokens_is_padding() -> None:
    """Captured batches may hold such rows: zeros, whatever the page table says."""
    backend = XformersAttention(requests["float32"])
    for lengths in ([300, 200], [30, 20]):  # split, and not
        case = AttentionCase(requests["float32"], [1, 1], lengths, 64, device="cpu")
        cache, plan = case.cache(backend), backend.build_metadata(case.batch)
        case.batch.seq_lens[1] = 0
        out = backend.forward(case.q, case.k, case.v, cache, plan)
        assert (out[1] == 0).all()
        torch.testing.assert_close(out[0], case.expected()[0], rtol=1e-4, atol=1e-4)


def test_keys_are_gathered_in_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long context must not be held twice, let alone that of every row."""
    monkeypatch.setattr(module, "_GATHERED", 60)
    case = AttentionCase(
        requests["float32"], [1, 3, 4, 9, 2], [70, 30, 30, 90, 2], 16, device="cpu"
    )
    backend = XformersAttention(case.request)
    plan = backend.build_metadata(case.batch)
    assert [len(rows.slots) for rows in plan.prompts] == [60, 90, 2]
    assert [rows.new for rows in plan.prompts] == [False, False, True]
    case.check(backend.forward(case.q, case.k, case.v, case.cache(backend), plan))


def test_new_prompts_are_not_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    case = AttentionCase(requests["float32"], [7, 20], [7, 20], 16, device="cpu")
    backend = XformersAttention(case.request)
    cache, plan = case.cache(backend), backend.build_metadata(case.batch)
    monkeypatch.setattr(plan.prompts[0], "slots", None)
    case.check(backend.forward(case.q, case.k, case.v, cache, plan))


def test_the_operators_would_take_what_they_get(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calling them directly skips their own checks; so they are asked here."""
    checks: list[tuple[str, list[str]]] = []

    def watched(operator: Any) -> Callable[..., Any]:
        apply = operator.apply.__func__

        def checked(cls: Any, inputs: Any, needs_gradient: bool) -> Any:
            inputs.validate_inputs()
            reasons = cls.not_supported_reasons(inputs)
            checks.append(
                (cls.NAME, [r for r in reasons if not r.startswith(("device=", "dtype="))])
            )
            return apply(cls, inputs, needs_gradient)

        return classmethod(checked)  # type: ignore[return-value]

    for operator in (flash.FwOp, triton_splitk.FwOp):
        monkeypatch.setattr(operator, "apply", watched(operator))
    # The device is another; the bias of decode has host lengths that only this check compares.
    for page_size in (16, 32, 64, 128, 256):
        case = AttentionCase(
            requests["float16"], [1, 1, 1, 6, 21], [50, 2, 31, 6, 60], page_size, device="cpu"
        )
        case.check(run(case))
    assert len(checks) > 10 and {name.partition("@")[0] for name, _ in checks} > {"fa2F"}
    assert [entry for entry in checks if entry[1]] == []
