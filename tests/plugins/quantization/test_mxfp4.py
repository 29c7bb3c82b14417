"""treadle-mxfp4 and treadle-experts-int8: blocks as transformers reads them, and experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from quantized_formats.mxfp4 import Mxfp4Format
from safetensors.torch import load_file, save_file
from torch import Tensor
from treadle_experts_int8.scheme import ExpertsInt8Scheme
from treadle_mxfp4.layers import dequantize

from treadle.api.communicators import Communicator
from treadle.api.models import LinearSpec
from treadle.errors import ConfigError
from treadle.plugins import PluginManager
from treadle.testing.checkpoints import make_checkpoint
from treadle.testing.linears import Layer, fill
from treadle.testing.models import TinyModel
from treadle.testing.packing import pack_checkpoint
from treadle.testing.plugin import PluginSuite
from treadle.testing.quantization import QuantizationSuite
from treadle.testing.ranks import run_on_ranks
from treadle_layers_kit import Experts

IDS = torch.randint(0, 256, (19,), generator=torch.Generator().manual_seed(5))
MOE = {"moe_intermediate_size": 64, "num_experts": 6, "num_experts_per_tok": 3}
STACKS = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}


class TestMxfp4(PluginSuite, QuantizationSuite):
    plugin = "quantization:mxfp4"
    formats = {"blocks of 32": Mxfp4Format()}
    refused = {
        "names": ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
        "another method": ({"quant_method": "squeezellm"}, "'squeezellm'"),
    }


@pytest.fixture(scope="module")
def plugins() -> PluginManager:
    return PluginManager()


def test_numbers_are_those_of_transformers() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.randint(0, 256, (3, 8, 2, 16), generator=torch.Generator().manual_seed(3))
    scales = torch.randint(119, 130, (3, 8, 2), generator=torch.Generator().manual_seed(4))
    packed, exponents = blocks.to(torch.uint8), scales.to(torch.uint8)
    expected = convert_moe_packed_tensors(packed, exponents, dtype=torch.float32)
    for expert in range(3):
        ours = dequantize(packed[expert], exponents[expert])
        assert torch.equal(ours, expected[expert].t())


def methods(model: TinyModel) -> list[str]:
    """The methods of the layers' experts, without the plugin manager's guard."""
    experts = (m for m in model.model.modules() if isinstance(m, Experts))
    return [type(m.method).__name__.removeprefix("Guarded") for m in experts]


def stacked(folder: Path) -> None:
    """Store the experts of each layer in one tensor, as transformers does."""
    tensors = load_file(folder / "model.safetensors")
    experts = {name for name in tensors if ".experts." in name}
    stacks: dict[str, list[Tensor]] = {}
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        for stack, names in STACKS.items():
            for leaf in ("blocks", "scales"):
                stacks[f"{prefix}.{stack}_proj_{leaf}"] = [
                    torch.cat([tensors[f"{prefix}.{e}.{n}.weight_{leaf}"] for n in names])
                    for e in range(MOE["num_experts"])
                ]
    rest = {name: t for name, t in tensors.items() if name not in experts}
    joined = {name: torch.stack(parts) for name, parts in stacks.items()}
    save_file({**rest, **joined}, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("in_stacks", [False, True])
def test_experts_are_the_dequantized_ones(
    tmp_path: Path, plugins: PluginManager, in_stacks: bool
) -> None:
    source = make_checkpoint(tmp_path / "source", "Qwen3MoeForCausalLM", num_hidden_layers=2, **MOE)
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    pack_checkpoint(source, packed, plain, Mxfp4Format(), (".gate",))
    if in_stacks:
        stacked(packed)
    expected = TinyModel(plain, plugins).logits(IDS)
    model = TinyModel(packed, plugins)
    assert methods(model) == ["Mxfp4Experts"] * 2
    assert (model.logits(IDS) - expected).abs().max() < 1e-3

    def work(tp_group: Communicator) -> Tensor:
        return TinyModel(packed, plugins, tp_group=tp_group).logits(IDS)

    for logits in run_on_ranks(2, work):
        assert (logits - expected).abs().max() < 1e-3


def test_blocks_that_ranks_would_cut() -> None:
    from treadle_mxfp4.scheme import Mxfp4Scheme

    layer = Layer(96, (32,), split="row")
    with pytest.raises(ConfigError, match="blocks of 32"):
        run_on_ranks(
            2, lambda ranks: fill(Mxfp4Scheme(()), layer, {}, torch.float32, tp_group=ranks)
        )


@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "Qwen3MoeForCausalLM"])
def test_experts_in_int8_made_while_loading(
    tmp_path: Path, plugins: PluginManager, architecture: str
) -> None:
    """The logits of the model whose experts were rounded before, on one rank and on two."""
    changes = MOE if architecture.startswith("Qwen3") else {"num_local_experts": 4}
    source = make_checkpoint(tmp_path / "source", architecture, num_hidden_layers=2, **changes)
    tensors = load_file(source / "model.safetensors")
    for name, weight in tensors.items():
        if ".experts." in name:
            scale = weight.float().abs().amax(1, keepdim=True) / 127
            rounded = (weight.float() / scale).round() * scale
            assert 1e-3 < (rounded - weight).norm() / weight.norm() < 0.02
            tensors[name] = rounded
    plain = make_checkpoint(tmp_path / "plain", architecture, num_hidden_layers=2, **changes)
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    expected = TinyModel(plain, plugins).logits(IDS)
    model = TinyModel(source, plugins, quantization="experts_int8")
    assert methods(model) == ["Int8Experts"] * 2
    assert (model.logits(IDS) - expected).abs().max() < 1e-3

    def work(tp_group: Communicator) -> Tensor:
        small = TinyModel(source, plugins, tp_group=tp_group, quantization="experts_int8")
        return small.logits(IDS)

    # A rank sees its part of an output of ``down``, so that its scales are finer.
    for logits in run_on_ranks(2, work):
        assert (logits - expected).norm() < 0.02 * expected.norm()


def test_experts_int8_leaves_the_rest_and_what_is_quantized() -> None:
    spec = LinearSpec("a", ("a",), 64, (64,), False, torch.float32)
    assert ExpertsInt8Scheme({}).linear_method(spec) is None
    with pytest.raises(ConfigError, match="quantized with 'awq'"):
        ExpertsInt8Scheme({"quant_method": "awq"})
