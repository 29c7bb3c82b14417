"""The kernels of ``fused_experts`` on a card, with the tiles of every number of rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from treadle_layers_kit import ops

pytestmark = pytest.mark.gpu


def by_expert(
    x: Tensor, topk_ids: Tensor, stacks: tuple[Tensor, Tensor], biases: tuple[Tensor, ...]
) -> Tensor:
    """Products in float32; what lies between them has the type of ``x``."""
    chosen = topk_ids.reshape(-1)
    rows = x.repeat_interleave(topk_ids.shape[1], dim=0).float()
    y = torch.empty(len(rows), stacks[1].shape[1], device=x.device)
    for expert in chosen.unique().tolist():
        mine = chosen == expert
        values = rows[mine]
        for place, weight in enumerate(stacks):
            values = values @ weight[expert].float().t()
            values += biases[place][expert].float() if biases else 0.0
            values = values if place else ops.silu_and_mul(values.to(x.dtype)).float()
        y[mine] = values
    return y


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("experts", "k", "hidden", "inner"),
    [(128, 8, 2048, 768), (8, 2, 512, 1792), (12, 3, 72, 40)],
    ids=["Qwen3-30B-A3B", "few experts", "odd sizes"],
)
def test_products_are_those_of_each_expert(
    experts: int, k: int, hidden: int, inner: int, dtype: torch.dtype, has_bias: bool
) -> None:
    from treadle_kernels_triton.experts import fused_experts

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, device="cuda") * scale).to(dtype)

    torch.manual_seed(0)
    stacks = random(experts, 2 * inner, hidden, scale=hidden**-0.5), random(experts, hidden, inner)
    biases = (random(experts, 2 * inner), random(experts, hidden)) if has_bias else ()
    for tokens in 1, 2, 3, 17, 40, 130, 256, 400, 600, 1500:
        x = random(tokens, hidden)
        topk_ids = torch.rand(tokens, experts, device="cuda").topk(k).indices
        arguments = (x, topk_ids, *stacks, *(biases or (None, None)), ops.silu_and_mul)
        expected = by_expert(x, topk_ids, stacks, biases)
        for use_pdl in False, torch.cuda.get_device_capability() >= (9, 0):
            y = fused_experts(*arguments, use_pdl=use_pdl).float()
            assert (y - expected).norm() < 1e-2 * expected.norm(), tokens
