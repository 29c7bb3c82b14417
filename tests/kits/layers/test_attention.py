"""Where an attention layer's result goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from treadle.api.models import ModelContext
from treadle.testing.attention import AttentionCase
from treadle.testing.attention_reference import ReferenceBackend
from treadle_layers_kit import Attention


class Writer(ReferenceBackend):
    """Writes where it is told."""

    def forward_into(self, out: Tensor, *arguments: Any, **named: Any) -> None:
        out.copy_(super().forward(*arguments, **named))

    def forward(self, *arguments: Any, **named: Any) -> Tensor:
        raise AssertionError("the caller has a place for the result")


@pytest.mark.parametrize("backend", [ReferenceBackend, Writer])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_result_is_where_the_caller_wants_it(
    context: Callable[..., ModelContext], backend: type[Any], dtype: torch.dtype, sinks: bool
) -> None:
    ctx = replace(context(), register_attention=lambda request, spec: backend(request))
    layer = Attention(ctx, "attn", 4, 2, 64, sinks=sinks)
    case = AttentionCase(layer.request, [1, 3], [7, 3], 4, device="cpu")
    reference = ReferenceBackend(layer.request)
    if sinks:
        assert layer.sinks is not None
        layer.sinks.data.copy_(torch.randn(4))
    layer.scales = (2.0, 0.5) if dtype == torch.float8_e4m3fn else (1.0, 1.0)
    more = {"sinks": layer.sinks} if sinks else {}
    cache = case.cache(reference).to(dtype)
    layer.cache = cache.clone()
    expected = reference.forward(
        case.q, case.k, case.v, cache, case.batch, layer.scales, **more
    ).flatten(1)
    out = torch.full_like(expected, torch.nan)
    assert layer.attend(case.q, case.k, case.v, case.batch, out) is out
    assert torch.equal(out, expected)
    assert torch.equal(layer.cache.view(torch.uint8), cache.view(torch.uint8))
