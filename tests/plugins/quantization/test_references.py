"""Matrices that the packages themselves made: as recorded in files, and whole models where they are installed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_formats.loaded import as_loaded
from quantized_formats.references import FOLDER, REFERENCES
from safetensors.torch import load_file
from torch import Tensor

from treadle.api.cache import DeviceInfo
from treadle.api.communicators import Communicator
from treadle.api.kinds import QUANTIZATION
from treadle.plugins import PluginManager
from treadle.testing.checkpoints import make_checkpoint
from treadle.testing.linears import HOME, Layer, fill
from treadle.testing.models import TinyModel
from treadle.testing.packing import pack_checkpoint
from treadle.testing.ranks import run_on_ranks

IDS = torch.randint(0, 256, (19,), generator=torch.Generator().manual_seed(5))
MODELS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "Qwen3ForCausalLM": {},
    "MixtralForCausalLM": {"num_local_experts": 4},
}


@pytest.fixture(scope="module")
def plugins() -> PluginManager:
    return PluginManager()


@dataclass(frozen=True)
class Recorded:
    """A layer that has the recorded matrix, on one rank."""

    plugins: PluginManager
    name: str

    def weight(self, tp_group: Communicator | None = None) -> tuple[Tensor, Tensor]:
        """What this rank computes from the identity, and the weight that the package read back."""
        tensors = load_file(FOLDER / f"{self.name}.safetensors")
        expected = tensors.pop("expected")
        reference = REFERENCES[self.name]
        stored = {f"{HOME}.a_proj.{leaf}": tensor for leaf, tensor in tensors.items()}
        config = reference.config()
        scheme = self.plugins.create(
            QUANTIZATION, config["quant_method"], checkpoint=config, device=DeviceInfo("cpu")
        )
        layer = Layer(expected.shape[1], (len(expected),), split="row")
        loaded = as_loaded(reference, stored)
        linear = fill(scheme, layer, loaded, torch.float32, tp_group=tp_group)
        x = torch.eye(expected.shape[1])
        if tp_group is not None:
            x = x.chunk(2, dim=1)[tp_group.rank].contiguous()
        with torch.inference_mode():
            return linear(x).t(), expected


@pytest.mark.parametrize("name", REFERENCES)
def test_a_recorded_matrix_is_what_the_package_reads(name: str, plugins: PluginManager) -> None:
    """Recorded by ``quantized_formats/references.py``; whole, and by two ranks that share the inputs."""
    recorded = Recorded(plugins, name)
    weight, expected = recorded.weight()
    torch.testing.assert_close(weight, expected, atol=2e-6, rtol=1e-5)
    for shared, _ in run_on_ranks(2, recorded.weight):
        torch.testing.assert_close(shared, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("architecture", MODELS)
@pytest.mark.parametrize("name", REFERENCES)
def test_logits_are_those_of_the_package(
    tmp_path: Path, plugins: PluginManager, name: str, architecture: str
) -> None:
    reference = REFERENCES[name]
    if not reference.is_here:
        pytest.skip(f"compares with {reference.package} itself")
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}
    source = make_checkpoint(tmp_path / "source", architecture, **sizes, **MODELS[architecture])
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    pack_checkpoint(source, packed, plain, reference, (".gate",))
    expected = TinyModel(plain, plugins).logits(IDS)
    assert (TinyModel(packed, plugins).logits(IDS) - expected).abs().max() < 1e-3

    def work(tp_group: Communicator) -> Tensor:
        return TinyModel(packed, plugins, tp_group=tp_group).logits(IDS)

    for logits in run_on_ranks(2, work):
        assert (logits - expected).abs().max() < 1e-3
