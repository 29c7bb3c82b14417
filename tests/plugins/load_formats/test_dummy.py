"""Random weights: finite, the same for the same seed, and of every dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from treadle_dummy import treadle_load_format
from treadle_dummy.weights import DummyLoader, fill_randomly

from treadle.plugins import PluginManager
from treadle.testing.checkpoints import make_checkpoint
from treadle.testing.models import TinyModel


@pytest.fixture(scope="module")
def plugins() -> PluginManager:
    return PluginManager()


def dummy(folder: Path, plugins: PluginManager, **options: Any) -> TinyModel:
    return TinyModel(folder, plugins, load_format="dummy", **options)


def test_dummy_weights_give_finite_logits_that_depend_on_the_input(
    tmp_path: Path, plugins: PluginManager
) -> None:
    folder = make_checkpoint(tmp_path, attention_bias=True)
    (folder / "model.safetensors").unlink()
    model = dummy(folder, plugins)
    logits = model.logits(torch.arange(20))
    assert logits.isfinite().all()
    assert len(set(logits.argmax(-1).tolist())) > 5
    assert torch.equal(dummy(folder, plugins).logits(torch.arange(20)), logits), "not reproducible"


def test_the_option_counts_more_than_the_seed_of_the_engine() -> None:
    loaders = [treadle_load_format("dummy", 5, options) for options in ({}, {"seed": 3})]
    assert [loader.seed for loader in loaders if isinstance(loader, DummyLoader)] == [5, 3]
    assert treadle_load_format("gguf", 0, {}) is None


@pytest.mark.parametrize("type", ["Q4_0", "Q5_K", "IQ4_XS"])
def test_dummy_blocks_of_gguf_give_finite_logits(
    tmp_path: Path, plugins: PluginManager, type: str
) -> None:
    quantized = {"quant_method": "gguf", "file": "none.gguf", "types": {"*": type}}
    sizes = {"hidden_size": 256, "intermediate_size": 512}
    folder = make_checkpoint(tmp_path, **sizes, quantization_config=quantized)
    model = dummy(folder, plugins)
    assert model.logits(torch.arange(20)).isfinite().all()


def test_dummy_fills_quantized_parameters(tmp_path: Path) -> None:
    from treadle_layers_kit import empty_weight

    module = nn.Module()
    module.packed = empty_weight([64, 64], torch.int32)
    module.bytes = empty_weight([64, 64], torch.uint8)
    module.eighth = empty_weight([64, 64], torch.float8_e4m3fn)
    module.order = empty_weight([64], torch.int32)
    module.scale = empty_weight([64], torch.float32)
    fill_randomly(module, 0)
    assert module.packed.unique().numel() > 4000
    assert module.bytes.unique().numel() > 200
    assert module.eighth.float().isfinite().all()
    assert module.order.tolist() == [0] * 64
    assert module.scale.tolist() == [1.0] * 64
