"""Linear layers that give their results to norms in parts: which do, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from treadle.api.attention import KernelOffer, KernelRequest
from treadle.api.cache import DeviceInfo
from treadle.plugins import PluginManager
from treadle.testing.checkpoints import make_checkpoint
from treadle.testing.models import TinyModel
from treadle.testing.ranks import run_on_ranks
from treadle_layers_kit import ops
from treadle_layers_kit.linear_norms import LinearNormPair
from treadle_worker_kit.fusion import apply_fusions

CPU = DeviceInfo("cpu")
IDS = torch.arange(40, 53)


class Offers:
    """Both operations, with a count of what came in parts; ``missing`` is not offered."""

    def __init__(self, missing: str = "") -> None:
        self.missing = missing
        self.added = 0

    def kernel(self, op: str, request: KernelRequest) -> KernelOffer | None:
        kernels: dict[str, Callable[..., Any]] = {
            "linear_split_k": self.parts,
            "fused_add_partials_rms_norm": self.add,
        }
        if op == self.missing or op not in kernels:
            return None
        return KernelOffer("mine", 1, lambda: kernels[op])

    def parts(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        assert bias is None
        pieces = zip(x.tensor_split(3, 1), weight.tensor_split(3, 1), strict=True)
        return torch.stack([F.linear(*piece) for piece in pieces])

    def add(
        self, parts: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float
    ) -> tuple[Tensor, Tensor]:
        assert parts.dtype == torch.float32 and parts.shape[1:] == residual.shape
        self.added += 1
        return ops.fused_add_rms_norm(
            parts.sum(0).to(residual.dtype), residual, weight, eps, offset
        )


def built(folder: Path, architecture: str, **changes: Any) -> TinyModel:
    return TinyModel(make_checkpoint(folder, architecture, seed=1, **changes), PluginManager())


@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
)
def test_results_may_come_in_parts(architecture: str, tmp_path: Path) -> None:
    tiny = built(tmp_path, architecture)
    expected, logits_indices = tiny.logits(IDS), torch.tensor([4, 12])
    chosen = tiny.logits(IDS, logits_indices=logits_indices)
    offers = Offers()
    served = apply_fusions(tiny.model, offers.kernel, CPU, "float32")
    assert served.backends == {"linear_split_k": "mine", "fused_add_partials_rms_norm": "mine"}
    torch.testing.assert_close(tiny.logits(IDS), expected, rtol=1e-4, atol=1e-5)
    layers = tiny.config.num_hidden_layers
    assert offers.added == 2 * layers - 1, (
        "all but the attention of the last, where rows are chosen"
    )
    torch.testing.assert_close(
        tiny.logits(IDS, logits_indices=logits_indices), chosen, rtol=1e-4, atol=1e-5
    )
    assert offers.added == 2 * (2 * layers - 1)


@pytest.mark.parametrize("missing", ["linear_split_k", "fused_add_partials_rms_norm"])
def test_one_operation_alone_is_not_used(missing: str, tmp_path: Path) -> None:
    tiny = built(tmp_path, "LlamaForCausalLM")
    expected, offers = tiny.logits(IDS), Offers(missing)
    apply_fusions(tiny.model, offers.kernel, CPU, "float32")
    assert torch.equal(tiny.logits(IDS), expected) and not offers.added


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("Gemma3ForCausalLM", {}),  # norms of their own after attention and MLP
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    ],
)
def test_others_stay_whole(architecture: str, changes: dict[str, Any], tmp_path: Path) -> None:
    tiny = built(tmp_path, architecture, **changes)
    expected, offers = tiny.logits(IDS), Offers()
    apply_fusions(tiny.model, offers.kernel, CPU, "float32")
    assert torch.equal(tiny.logits(IDS), expected) and not offers.added


def test_several_ranks_add_up_their_own_way(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "LlamaForCausalLM", seed=1)

    def run(tp_group: Any) -> tuple[int, int]:
        tiny = TinyModel(folder, PluginManager(), tp_group=tp_group)
        offers = Offers()
        apply_fusions(tiny.model, offers.kernel, CPU, "float32")
        tiny.logits(IDS)
        pairs = tiny.model.model.linear_norm_pairs("model")  # type: ignore[operator, union-attr]
        return offers.added, sum(isinstance(pair, LinearNormPair) for pair in pairs)

    for added, pairs in run_on_ranks(2, run):
        assert not added and pairs
