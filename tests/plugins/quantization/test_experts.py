"""Mixtures of experts in quantized checkpoints: the logits of the dequantized model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_formats.bitsandbytes import FourBitFormat, Int8Format
from quantized_formats.compressed_tensors import UnpackedFormat
from torch import Tensor

from treadle.api.communicators import Communicator
from treadle.errors import ConfigError
from treadle.plugins import PluginManager
from treadle.testing.checkpoints import make_checkpoint
from treadle.testing.models import TinyModel
from treadle.testing.packing import AwqFormat, Format, Fp8Format, GptqFormat, pack_checkpoint
from treadle.testing.ranks import run_on_ranks
from treadle_layers_kit import Experts
from treadle_layers_kit.experts import (
    LinearExperts,
    PlainExperts,
    apply_all_experts,
    apply_by_expert,
)

IDS = torch.randint(0, 256, (19,), generator=torch.Generator().manual_seed(5))
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralForCausalLM", {"intermediate_size": 128, "num_local_experts": 4}),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        {"moe_intermediate_size": 64, "num_experts": 6, "num_experts_per_tok": 3},
    ),
}
FORMATS: dict[str, Format] = {
    "awq": AwqFormat(32),
    # Silent about the routers, as AutoGPTQ is.
    "gptq": GptqFormat(group_size=32, extra={"dynamic": {}}),
    "gptq, act-order": GptqFormat(group_size=32, desc_act=True, sym=False, extra={"dynamic": {}}),
    "nf4": FourBitFormat(double=True),
    "int8": Int8Format(),
    "W8A8": UnpackedFormat(inputs="symmetric"),
    "fp8": Fp8Format(),
    "fp8, static": Fp8Format(static=True),
    "fp8, outputs": Fp8Format("channel"),
    "fp8, blocks": Fp8Format("block", block=(16, 32)),
}


@pytest.fixture(scope="module")
def plugins() -> PluginManager:
    return PluginManager()


def checkpoints(folder: Path, name: str, format: Format, *skipped: str) -> tuple[Path, Path]:
    """The model quantized, its routers and ``skipped`` excepted, and the same dequantized."""
    architecture, changes = MODELS[name]
    source = make_checkpoint(folder / "source", architecture, num_hidden_layers=2, **changes)
    packed, plain = folder / "packed", folder / "plain"
    pack_checkpoint(source, packed, plain, format, (".gate", *skipped))
    return packed, plain


def methods(model: TinyModel) -> list[type]:
    return [type(m.method) for m in model.model.modules() if isinstance(m, Experts)]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_dequantized_model(
    tmp_path: Path, plugins: PluginManager, name: str, format: str
) -> None:
    packed, plain = checkpoints(tmp_path, name, FORMATS[format])
    expected = TinyModel(plain, plugins).logits(IDS)
    model = TinyModel(packed, plugins)
    assert methods(model) == [LinearExperts] * 2
    assert (model.logits(IDS) - expected).abs().max() < 1e-3

    def work(tp_group: Communicator) -> Tensor:
        return TinyModel(packed, plugins, tp_group=tp_group).logits(IDS)

    for logits in run_on_ranks(2, work):
        assert (logits - expected).abs().max() < 1e-3
    source = TinyModel(tmp_path / "source", plugins).logits(IDS)
    assert (source - expected).abs().max() > 0.05, (
        "the checkpoint loses nothing: this shows nothing"
    )


def test_experts_that_are_left_alone_stay_stacked(tmp_path: Path, plugins: PluginManager) -> None:
    packed, plain = checkpoints(tmp_path, "mixtral", AwqFormat(32), ".w1", ".w2", ".w3")
    model = TinyModel(packed, plugins)
    assert methods(model) == [PlainExperts] * 2
    assert (model.logits(IDS) - TinyModel(plain, plugins).logits(IDS)).abs().max() < 1e-3


def test_some_matrices_may_be_left_alone(tmp_path: Path, plugins: PluginManager) -> None:
    packed, plain = checkpoints(tmp_path, "qwen3-moe", Fp8Format(), "down_proj")
    model = TinyModel(packed, plugins)
    assert methods(model) == [LinearExperts] * 2
    assert (model.logits(IDS) - TinyModel(plain, plugins).logits(IDS)).abs().max() < 1e-3


def test_a_share_that_cuts_through_words_is_refused(tmp_path: Path, plugins: PluginManager) -> None:
    sizes = {"intermediate_size": 32, "num_local_experts": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8}
    source = make_checkpoint(tmp_path / "source", "MixtralForCausalLM", **sizes, **heads)
    pack_checkpoint(source, tmp_path / "packed", tmp_path / "plain", AwqFormat(32), (".gate",))
    with pytest.raises(ConfigError, match=r"experts\.0.*4 output features.*tensor_parallel_size"):
        run_on_ranks(8, lambda ranks: TinyModel(tmp_path / "packed", plugins, tp_group=ranks))


@pytest.mark.parametrize("tokens", [1, 7])
def test_asking_every_expert_gives_the_same(tokens: int) -> None:
    """What few tokens on a GPU do, so that the step can be captured."""
    drawn = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 8, generator=drawn)
    chosen = torch.stack([torch.randperm(6, generator=drawn)[:3] for _ in range(tokens)])
    matrices = torch.randn(6, 8, 8, generator=drawn)

    def run(index: int, rows: Tensor) -> Tensor:
        return rows @ matrices[index]

    expected = torch.einsum("th,tkhj->tkj", x, matrices[chosen])
    torch.testing.assert_close(apply_by_expert(x, chosen, run), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(apply_all_experts(x, chosen, run, 6), expected, atol=1e-5, rtol=1e-5)
