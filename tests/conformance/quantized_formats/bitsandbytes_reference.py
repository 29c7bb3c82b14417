"""A checkpoint that transformers and bitsandbytes write, and the logits of the model that they unpack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treadle.api.communicators import Communicator
from treadle.plugins import PluginManager
from treadle.testing.checkpoints import make_checkpoint
from treadle.testing.models import TinyModel
from treadle.testing.ranks import run_on_ranks

__all__ = ("compare",)

IDS = torch.arange(3, 40)


@torch.inference_mode()
def compare(folder: Path, sizes: dict[str, Any], **options: Any) -> None:
    """Quantize a tiny Llama by the packages' own API, save it, unpack it by the same, and compare logits."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    source, packed = (
        make_checkpoint(folder / "source", "LlamaForCausalLM", **sizes),
        folder / "packed",
    )
    full = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)(IDS[None]).logits[0]
    model = AutoModelForCausalLM.from_pretrained(
        source,
        dtype=torch.float32,
        quantization_config=BitsAndBytesConfig(**options),
        device_map={"": "cpu"},
    )
    model.save_pretrained(packed)
    expected = model.dequantize(torch.float32)(IDS[None]).logits[0]
    assert (expected - full).abs().max() > 1e-3, "nothing is lost, so this shows nothing"

    plugins = PluginManager()
    actual = TinyModel(packed, plugins).logits(IDS)
    assert (actual - expected).abs().max() < 1e-3

    def work(tp_group: Communicator) -> Tensor:
        return TinyModel(packed, plugins, tp_group=tp_group).logits(IDS)

    for logits in run_on_ranks(2, work):
        assert (logits - expected).abs().max() < 1e-3
