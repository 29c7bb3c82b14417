"""Experts in FP8, int8 and with act-order on one CUDA device: a layer as a model has it.

::

    python benchmarks/experts.py [FORMAT …]

Microseconds of the experts of one layer: what sorts the choices, rounds, multiplies and activates, without router and
sum. Up to 256 tokens it is the median over replays of a CUDA graph, whose calls chose different experts; for more tokens that of
calls, because a layer may ask the device who was chosen.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from kernels import seconds
from torch import Tensor, nn

from treadle.api.cache import DeviceInfo
from treadle.api.kinds import QUANTIZATION
from treadle.api.models import ModelContext
from treadle.plugins import PluginManager
from treadle_layers_kit import Experts, SingleRankCommunicator
from treadle_worker_kit.fusion import apply_fusions, kernel_finder
from treadle_worker_kit.weights import finish

SHAPES = {  # experts, of which a token chooses, hidden, inner
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "mixtral-8x7b": (8, 2, 4096, 14336),
}
TOKENS = (1, 32, 256, 8192)
CAPTURED = 256
W8A8 = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
    "input_activations": {
        "num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True
    },
}  # fmt: skip
FORMATS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "fp8-blocks": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "w8a8": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": W8A8},
    },
    "gptq-act-order": {
        "quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": True
    },
}  # fmt: skip


def fill(module: nn.Module, first: int) -> None:
    """Random parameters of a layer's experts; groups of act-order are in another order in each."""
    for name, parameter in module.named_parameters():
        data = parameter.data
        if name.endswith("g_idx"):
            expert = int(name.partition(".")[0])
            generator = torch.Generator(data.device).manual_seed(first + expert)
            order = torch.randperm(len(data), generator=generator, device=data.device)
            data.copy_((torch.arange(len(data), device=data.device) // 128)[order])
        elif name.endswith("spare_bias"):
            data.zero_()
        elif data.is_floating_point():
            data.copy_(torch.rand(data.shape, device=data.device) * 0.02 + 0.001)
        else:
            info = torch.iinfo(data.dtype)
            data.random_(info.min, info.max)


def layer(name: str, shape: str) -> Experts:
    experts, _, hidden, inner = SHAPES[shape]
    config, device = FORMATS[name], DeviceInfo("cuda", torch.cuda.get_device_capability())
    plugins = PluginManager()
    scheme = None
    if config:
        method = config["quant_method"]
        scheme = plugins.create(QUANTIZATION, method, checkpoint=config, device=device)
    context = ModelContext(
        hf_config=SimpleNamespace(),
        dtype=torch.bfloat16,
        device=torch.device("cuda"),
        tp_group=SingleRankCommunicator(),
        quantization=scheme,
        register_attention=lambda request, spec: None,  # type: ignore[arg-type,return-value]
    )
    with torch.device("cuda"), torch.no_grad():
        built = Experts(context, "model.layers.0.mlp.experts", experts, hidden, inner)
        fill(built, 0)
        finish(built)
    apply_fusions(built, kernel_finder(plugins), device, "bfloat16")
    return built


def choices(tokens: int, shape: str) -> Tensor:
    experts, k, _, _ = SHAPES[shape]
    return torch.rand(tokens, experts, device="cuda").topk(k).indices


def microseconds(calls: list[Any], *, is_captured: bool) -> float:
    if is_captured:
        return 1e6 * seconds(calls)
    times = []
    for call in calls * 4:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    return statistics.median(times[2:])


def time_layers(names: list[str]) -> None:
    print(f"{'us of':>30}" + "".join(f"{tokens:>10}" for tokens in TOKENS))
    for shape, (_, _, hidden, _) in SHAPES.items():
        for name in names:
            built = layer(name, shape)
            text = f"{shape:>15}{name:>15}"
            for tokens in TOKENS:
                x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
                apply = partial(built.method.apply, built, x)
                calls = [partial(apply, choices(tokens, shape), built.op) for _ in range(4)]
                with torch.inference_mode():
                    time = microseconds(calls, is_captured=tokens <= CAPTURED)
                text += f"{time:10.1f}"
            parts = sorted({key for key in built._modules if not key.isdecimal()})
            print(text, *parts, flush=True)
            del built, apply, calls
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("format", nargs="*", help=", ".join(FORMATS))
    options = parser.parse_args()
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    time_layers(options.format or list(FORMATS))


if __name__ == "__main__":
    main()
