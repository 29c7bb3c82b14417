"""Scales of an fp8 cache: where they come from, and that results are those of a wide cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_formats.compressed_tensors import FloatFormat, UnpackedFormat
from quantized_formats.modelopt import ModelOptFormat
from quantized_formats.quark import QuarkFormat
from safetensors.torch import load_file, save_file

from treadle.config import from_options
from treadle.errors import CheckpointError, ConfigError
from treadle.plugins import PluginManager
from treadle.runner.attention import build_metadata
from treadle.runner.model_runner import LoadedModel
from treadle.testing.attention_reference import batch_of
from treadle.testing.checkpoints import make_checkpoint
from treadle.testing.packing import Format, pack_checkpoint
from treadle.testing.ranks import run_on_ranks
from treadle_layers_kit import Attention, SingleRankCommunicator
from treadle_worker_kit.load import load_model
from treadle_worker_kit.stages import StartStages
from treadle_worker_kit.start import start_runner

# Far from what e4m3 holds: keys up to some thousands, values of some hundred thousandths.
KEYS, VALUES = 3000.0, 1e-5
NAMES = {
    "block": ("{}.k_scale", "{}.v_scale"),
    "layer": ("{}.attn.k_scale", "{}.attn.v_scale"),
    "projections": ("{}.k_proj.k_scale", "{}.v_proj.v_scale"),
    "outputs": ("{}.k_proj.output_scale", "{}.v_proj.output_scale"),
    "fused": ("{}.qkv_proj.k_scale", "{}.qkv_proj.v_scale"),
}


def checkpoint(folder: Path, *names: str, scales: tuple[float, ...] = (), **changes: Any) -> Path:
    """A Llama whose keys and values need scales, which its output projection makes good for."""
    make_checkpoint(folder, num_hidden_layers=2, **changes)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for layer in range(2):
        block = f"model.layers.{layer}.self_attn"
        tensors[f"{block}.q_proj.weight"] /= KEYS
        tensors[f"{block}.k_proj.weight"] *= KEYS
        tensors[f"{block}.v_proj.weight"] *= VALUES
        tensors[f"{block}.o_proj.weight"] /= VALUES
        for name, scale in zip(names, scales, strict=True):
            tensors[name.format(block)] = torch.tensor(scale)
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def start(folder: Path, ranks: Any = None, **options: Any) -> LoadedModel:
    defaults = {"kv_cache_dtype": "fp8_e4m3", "num_pages": 16, "device": "cpu", "dtype": "float32"}
    config = from_options(model=str(folder), **defaults | options)
    ranks = ranks or SingleRankCommunicator()
    plugins = PluginManager(config.plugins)
    return load_model(config, plugins, ranks, StartStages(ranks))[0]


def logits(started: LoadedModel) -> torch.Tensor:
    """Of a prompt of 30 tokens, of which the last 3 come one by one."""
    model, size, device = started.model, started.info.page_size, started.device
    ids = torch.arange(5, 35, device=device)
    with torch.inference_mode():
        for first, last in ((0, 27), (27, 28), (28, 29), (29, 30)):
            batch, _ = batch_of([last - first], [last], page_size=size, device=device)
            forward_ctx = build_metadata(started.attention, [batch])
            positions = torch.arange(first, last, device=device)
            hidden = model.forward(ids[first:last], positions, forward_ctx)
        return model.compute_logits(hidden[-1:]).cpu()


def scales(started: LoadedModel) -> list[tuple[float, float]]:
    model: Any = started.model
    return [m.scales for m in model.modules() if isinstance(m, Attention)]


def error(folder: Path, **options: Any) -> float:
    expected = logits(start(folder, kv_cache_dtype="auto"))
    return float((logits(start(folder, **options)) - expected).norm() / expected.norm())


@pytest.mark.parametrize("form", NAMES)
def test_they_come_from_the_checkpoint_whatever_their_names(form: str, tmp_path: Path) -> None:
    key, value = KEYS / 50, VALUES / 50
    folder = checkpoint(tmp_path, *NAMES[form], scales=(key, value))
    assert scales(start(folder)) == [pytest.approx((key, value))] * 2
    if form == "block":
        assert error(folder) < 0.08


def test_one_scale_for_both(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "{}.kv_scale", scales=(0.5,))
    assert scales(start(folder)) == [(0.5, 0.5)] * 2


def test_without_scales_they_are_one_and_large_keys_are_lost(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    assert scales(start(folder)) == [(1.0, 1.0)] * 2
    assert error(folder) > 0.5, "this model does not need scales: the other tests prove nothing"


QUANTIZED: dict[str, tuple[Format, str]] = {
    "compressed-tensors, FP8": (FloatFormat("channel"), "block"),
    "compressed-tensors, W8A8": (UnpackedFormat(inputs="symmetric"), "block"),
    "quark": (QuarkFormat(), "outputs"),
    "modelopt": (ModelOptFormat(), "projections"),
}
LAYER_SCALES = ((0.137, 0.029), (0.171, 0.041))
"""Of keys and values. A power of two would round as a scale of 1 does."""


def rounding_cache_logits(folder: Path, pairs: tuple[tuple[float, float], ...]) -> torch.Tensor:
    """What ``logits`` are, by transformers, whose cache rounds keys and values in torch."""
    from transformers import AutoModelForCausalLM, DynamicCache

    class RoundingCache(DynamicCache):
        def update(self, key: Any, value: Any, layer: int, *rest: Any, **named: Any) -> Any:
            key, value = (
                (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
                for x, scale in zip((key, value), pairs[layer], strict=True)
            )
            return super().update(key, value, layer, *rest, **named)

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    cache = RoundingCache(config=model.config)
    with torch.inference_mode():
        output = model(torch.arange(5, 35)[None], past_key_values=cache, use_cache=True)
    last: torch.Tensor = output.logits[0, -1:]
    return last


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
@pytest.mark.parametrize("name", QUANTIZED)
def test_those_of_a_quantized_checkpoint_round_what_is_cached(name: str, tmp_path: Path) -> None:
    format, form = QUANTIZED[name]
    source = make_checkpoint(tmp_path / "source", num_hidden_layers=2)
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    pack_checkpoint(source, packed, plain, format)
    tensors = load_file(packed / "model.safetensors")
    for layer, pair in enumerate(LAYER_SCALES):
        for pattern, scale in zip(NAMES[form], pair, strict=True):
            tensors[pattern.format(f"model.layers.{layer}.self_attn")] = torch.tensor(scale)
    save_file(tensors, packed / "model.safetensors", metadata={"format": "pt"})
    started = start(packed)
    assert scales(started) == [pytest.approx(pair) for pair in LAYER_SCALES]
    actual = logits(started)
    expected = rounding_cache_logits(plain, LAYER_SCALES)
    unscaled = rounding_cache_logits(plain, ((1.0, 1.0),) * 2)
    # One key in the middle of two numbers, which sums in another order round the other way, costs 1e-3.
    assert (actual - expected).abs().max() < 5e-3
    assert (actual - unscaled).abs().max() > 0.1, "without its scales it would be the same"


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_they_are_worked_out_when_asked_for(dtype: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, *NAMES["block"], scales=(1.0, 1.0))
    limit = {"fp8_e4m3": 0.15, "fp8_e5m2": 0.25}[dtype]
    assert error(folder, calculate_kv_scales=True, kv_cache_dtype=dtype) < limit


def test_every_rank_works_out_the_same(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    expected = scales(start(folder, calculate_kv_scales=True))
    for actual in run_on_ranks(
        2, lambda ranks: scales(start(folder, ranks, calculate_kv_scales=True))
    ):
        assert actual == [pytest.approx(pair, rel=1e-3) for pair in expected]


def test_a_graph_or_kernel_is_made_after_they_are_known(tmp_path: Path) -> None:
    """``ModelRunner`` captures what ``load_model`` returns, whose scales never change again."""
    folder = checkpoint(tmp_path)
    config = from_options(
        model=str(folder), kv_cache_dtype="fp8_e4m3", calculate_kv_scales=True, num_pages=16,
        device="cpu",
    )  # fmt: skip
    runner = start_runner(config, PluginManager(config.plugins))
    layers = [m for m in runner.model.modules() if isinstance(m, Attention)]  # type: ignore[attr-defined]
    assert all(m.scales != (1.0, 1.0) for m in layers)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_on_a_card_the_fused_write_scales_too(dtype: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, head_dim=64)
    expected = logits(start(folder, kv_cache_dtype="auto"))
    options = {"device": "cuda", "dtype": "bfloat16", "kv_cache_dtype": dtype, "num_pages": 16}
    started = start(folder, calculate_kv_scales=True, **options)
    if torch.cuda.get_device_capability() >= (8, 9):
        assert any("rope_and_cache_fp8" in line for line in started.info.report)
    assert (logits(started) - expected).norm() < 0.3 * expected.norm()


@pytest.mark.gpu
def test_graphs_keep_the_scales(tmp_path: Path) -> None:
    from treadle import LLM, SamplingParams

    folder = checkpoint(tmp_path, head_dim=64, tokenizer=True)
    greedy = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    token_ids = []
    for eager in (True, False):
        with LLM(
            str(folder), device="cuda", dtype="bfloat16", kv_cache_dtype="fp8_e4m3",
            calculate_kv_scales=True, num_pages=64, max_num_seqs=4, enforce_eager=eager,
        ) as llm:  # fmt: skip
            outputs = llm.generate([{"prompt_token_ids": [5, 9, 77]}], greedy, use_tqdm=False)
            token_ids.append(list(outputs[0].outputs[0].token_ids))
    assert token_ids[0] == token_ids[1]


def test_errors(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "negative", *NAMES["block"], scales=(-1.0, 1.0))
    with pytest.raises(
        CheckpointError, match=r"k_scale in .*safetensors.* is -1; it is divided by"
    ):
        start(folder)
    with pytest.raises(CheckpointError, match="without a tensor"):
        start(checkpoint(tmp_path / "half", "{}.k_scale", scales=(2.0,)))
    with pytest.raises(ConfigError, match="no cache is fp8"):
        start(checkpoint(tmp_path / "wide"), kv_cache_dtype="auto", calculate_kv_scales=True)
