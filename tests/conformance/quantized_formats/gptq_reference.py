"""A checkpoint that GPTQModel quantizes, and the logits of the model that it dequantizes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from treadle.api.communicators import Communicator
from treadle.plugins import PluginManager
from treadle.testing.models import TinyModel
from treadle.testing.ranks import run_on_ranks

__all__ = ("compare",)

IDS = torch.arange(30, 70)
TEXT = "The capital of France is Paris, and the river that runs through it is the Seine. " * 6
WORKERS = {"GPTQMODEL_CPU_WORKERS": "2"}  # by itself it takes one on small machines, and fails


@torch.inference_mode()
def compare(folder: Path, options: dict[str, Any]) -> None:
    """Quantize the demo model by the package, dequantize it by the same, and compare logits, of two ranks too."""
    import treadle_demo

    with patch.dict(os.environ, WORKERS):
        from gptqmodel import GPTQModel, QuantizeConfig
        from gptqmodel.utils.model_dequant import dequantize_model
    from transformers import AutoModelForCausalLM

    source = Path(treadle_demo.__file__).parent / "model"
    packed, plain = folder / "packed", folder / "plain"
    with torch.inference_mode(False):
        model = GPTQModel.load(
            str(source),
            QuantizeConfig(group_size=64, offload_to_disk=False, **options),
            device="cpu",
        )
        model.quantize([TEXT] * 16, batch_size=1)
    model.save(str(packed))
    dequantize_model(packed, plain, target_dtype=torch.float32, device="cpu")
    expected = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)(IDS[None]).logits[0]
    plugins = PluginManager()

    def logits(tp_group: Communicator | None = None) -> Tensor:
        return TinyModel(packed, plugins, tp_group=tp_group).logits(IDS)

    for found in (logits(), *run_on_ranks(2, logits)):
        assert (found - expected).abs().max() < 1e-3
    original = TinyModel(source, plugins, dtype=torch.float32).logits(IDS)
    assert (original - expected).abs().max() > 1e-2, "nothing was quantized"
