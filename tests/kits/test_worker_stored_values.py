"""Values that no shape shows to be wrong are refused while loading, by tensor and file, for every format."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from treadle.api.cache import DeviceInfo
from treadle.errors import CheckpointError, UnsupportedModelError
from treadle.plugins import PluginManager
from treadle.testing.checkpoints import make_checkpoint
from treadle.testing.models import TinyModel
from treadle.testing.packing import AwqFormat, Format, Fp8Format, GptqFormat, pack_checkpoint
from treadle_worker_kit.build import create_quantization_scheme
from treadle_worker_kit.foreign_methods import INSTEAD
from treadle_worker_kit.stored_values import has_nan_bytes, problem_of_scales

FORMATS: dict[str, Format] = {
    "scales of awq": AwqFormat(),
    "scales of gptq": GptqFormat(),
    "weight_scale": Fp8Format(static=True),
    "input_scale": Fp8Format(static=True),
    "weight_scale_inv": Fp8Format("block"),
}
NAN, INF = float("nan"), float("inf")
SIZES = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}


@pytest.fixture(scope="module")
def plugins() -> PluginManager:
    return PluginManager()


@pytest.fixture
def broken(tmp_path: Path) -> Callable[..., Path]:
    def make(format: Format, name: str, edit: Callable[[Tensor], Tensor]) -> Path:
        source = make_checkpoint(tmp_path / "source", **SIZES)
        pack_checkpoint(source, tmp_path / "packed", tmp_path / "plain", format)
        path = tmp_path / "packed" / "model.safetensors"
        tensors = load_file(path)
        tensors[name] = edit(tensors[name].clone())
        save_file(tensors, path)
        return path.parent

    return make


def refuse(folder: Path, plugins: PluginManager, *words: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        TinyModel(folder, plugins)
    for word in (*words, "model.safetensors"):
        assert re.search(word, str(raised.value)), f"{word} is not in: {raised.value}"


@pytest.mark.parametrize("title", FORMATS)
def test_scales_that_cannot_be_right(
    title: str, broken: Callable[..., Path], plugins: PluginManager
) -> None:
    name = f"model.layers.0.mlp.down_proj.{title.split()[0]}"

    def one(value: float) -> Callable[[Tensor], Tensor]:
        def edit(scales: Tensor) -> Tensor:
            scales.view(-1)[-1] = value
            return scales

        return edit

    folder = broken(FORMATS[title], name, one(NAN))
    path = folder / "model.safetensors"
    good = {**load_file(path), name: load_file(folder.parent / "packed/model.safetensors")[name]}
    signs = [] if title.startswith("scales") else [(one(-1.0), "negative|above 0")]
    cases = [(one(NAN), "1 of its"), (one(INF), "infinite"), (torch.zeros_like, "0"), *signs]
    for edit, words in cases:
        scales = torch.full_like(good[name].float(), 0.01).to(good[name].dtype)
        save_file({**good, name: edit(scales)}, path)
        refuse(folder, plugins, re.escape(name), words)
    save_file({**good, name: torch.full_like(good[name].float(), 0.01).to(good[name].dtype)}, path)
    TinyModel(folder, plugins)


@pytest.mark.parametrize("format", [Fp8Format(), Fp8Format("block"), Fp8Format("channel")])
@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_bytes_that_are_nan_in_fp8(
    format: Format, byte: int, broken: Callable[..., Path], plugins: PluginManager
) -> None:
    """In a matrix that is fused with others: the one that has it is named."""

    def edit(weight: Tensor) -> Tensor:
        weight.view(torch.uint8)[5, 7] = byte
        return weight

    name = "model.layers.0.self_attn.k_proj.weight"
    with pytest.raises(CheckpointError) as raised:
        TinyModel(broken(format, name, edit), plugins)
    assert name in str(raised.value) and "q_proj" not in str(raised.value)
    assert "NaN in FP8" in str(raised.value) and "model.safetensors" in str(raised.value)


def test_every_byte_of_fp8_is_told() -> None:
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        for byte in range(256):
            value = torch.tensor([0, byte], dtype=torch.uint8).view(dtype)
            assert has_nan_bytes(value) == (not value.float().isfinite().all()), (dtype, byte)


@pytest.mark.parametrize(
    ("name", "values", "is_right"),
    [
        ("a.k_scale", [0.0], False),
        ("a.k_scale", [0.5], True),
        ("a.weight_scale", [0.0, 1.0], True),
        ("a.weight_global_scale", [-1.0], False),
        ("a.scales", [-1.0, 1.0], True),
        ("a.norm.scale", [-1.0, 0.0], True),
        ("a.gate_up_proj_scales", [NAN], False),
        ("a.absmax", [0.0, 0.0], False),
        ("a.absmax", [-0.001, 0.5], True),
        ("a.SCB", [-1.0, 1.0], False),
        ("a.qzeros", [-3.0, 0.0], True),
        ("a.qzeros", [INF], False),
    ],
)
def test_what_a_scale_may_be(name: str, values: list[float], is_right: bool) -> None:
    assert (problem_of_scales(name, torch.tensor(values)) is None) == is_right


def test_an_exponent_that_is_nan() -> None:
    exponents = torch.tensor([127, 255], dtype=torch.uint8)
    assert problem_of_scales("a.down_proj_scales", exponents[:1]) is None
    assert "NaN" in (problem_of_scales("a.down_proj_scales", exponents) or "")


@pytest.mark.parametrize("version", [1, 2])
def test_zero_points_of_the_other_version_of_gptq(
    tmp_path: Path, version: int, plugins: PluginManager
) -> None:
    source = make_checkpoint(tmp_path / "source", **SIZES)
    wrong = "gptq_v2" if version == 1 else "gptq"
    format = GptqFormat(version=version, extra={"checkpoint_format": wrong})  # type: ignore[arg-type]
    pack_checkpoint(source, tmp_path / "packed", tmp_path / "plain", format)
    with pytest.raises(CheckpointError, match=rf"qzeros.*checkpoint_format is '{wrong}'"):
        TinyModel(tmp_path / "packed", plugins)


def test_a_method_of_others_says_what_to_use(plugins: PluginManager) -> None:
    for method, instead in INSTEAD.items():
        config = SimpleNamespace(quantization_config={"quant_method": method})
        for option in ("auto", method):
            with pytest.raises(UnsupportedModelError, match=re.escape(instead)):
                create_quantization_scheme(plugins, config, DeviceInfo("cpu"), option)
