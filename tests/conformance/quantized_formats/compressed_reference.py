"""A checkpoint that the compressed-tensors package writes, and the logits of the model that it unpacks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from treadle.api.communicators import Communicator
from treadle.plugins import PluginManager
from treadle.testing.checkpoints import make_checkpoint
from treadle.testing.models import TinyModel
from treadle.testing.ranks import run_on_ranks

__all__ = ("compare",)

IDS = torch.arange(3, 40)
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 2}


@torch.inference_mode()
def compare(folder: Path, weights: Mapping[str, Any]) -> None:
    """Compress a tiny Llama by the package's own API, unpack it by the same, and compare logits."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.compressors.nvfp4 import base as nvfp4
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.quant_config import QuantizationStatus
    from transformers import AutoModelForCausalLM

    source = make_checkpoint(folder / "source", "LlamaForCausalLM", **SIZES)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    full = model(IDS[None]).logits[0]
    group = {"targets": ["Linear"], "weights": dict(weights)}
    config = QuantizationConfig(
        config_groups={"group_0": group},
        ignore=["lm_head"],
        quantization_status=QuantizationStatus.INITIALIZED,
    )
    apply_quantization_config(model, config)
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            _set_scales(module)
            module.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    packed = folder / "packed"
    model.save_pretrained(packed)
    compressor.update_config(str(packed))
    # The package unpacks FP4 to bfloat16, which would round the products of its scales.
    in_float32 = partial(nvfp4.unpack_fp4_from_uint8, dtype=torch.float32)
    with patch.object(nvfp4, "unpack_fp4_from_uint8", in_float32):
        compressor.decompress_model(model)
    for module in model.modules():
        module.quantization_enabled = False
    expected = model(IDS[None]).logits[0]
    assert (expected - full).abs().max() > 1e-3, "nothing is lost, so this shows nothing"

    plugins = PluginManager()
    actual = TinyModel(packed, plugins).logits(IDS)
    assert (actual - expected).abs().max() < 1e-3

    def work(tp_group: Communicator) -> Tensor:
        return TinyModel(packed, plugins, tp_group=tp_group).logits(IDS)

    for logits in run_on_ranks(2, work):
        assert (logits - expected).abs().max() < 1e-3


def _set_scales(module: Any) -> None:
    """What an observer of smallest and largest values finds."""
    from compressed_tensors.quantization.utils import calculate_qparams
    from compressed_tensors.quantization.utils.helpers import generate_gparam

    args, weight = module.quantization_scheme.weights, module.weight
    total = None
    match args.strategy:
        case "tensor":
            low, high = weight.amin().reshape(1), weight.amax().reshape(1)
        case "channel":
            low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
        case "block":
            rows, columns = args.block_structure
            blocks = weight.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
            low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
        case _:
            groups = weight.unflatten(1, (-1, args.group_size))
            low, high = groups.amin(2), groups.amax(2)
    if args.strategy == "tensor_group":
        total = generate_gparam(weight.amin().reshape(1), weight.amax().reshape(1))
        module.weight_global_scale.data = total
    scale, zeros = calculate_qparams(low, high, args, total)
    module.weight_scale.data = scale.to(module.weight_scale.dtype)
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.data = zeros.to(module.weight_zero_point.dtype)
