"""Good and bad checkpoints: everything is loaded exactly once, or the error says what is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from treadle.api.models import ModelSpec
from treadle.errors import CheckpointError
from treadle.plugins import PluginManager
from treadle.testing.checkpoints import make_checkpoint
from treadle.testing.models import TinyModel
from treadle_layers_kit import (
    Linear,
    PlainLinear,
    Shard,
    SingleRankCommunicator,
    WeightTarget,
    empty_weight,
    set_shards,
)
from treadle_worker_kit.weights import load_weights

ONE = "model.safetensors"
IDS = torch.arange(3, 20)


@pytest.fixture(scope="module")
def plugins() -> PluginManager:
    return PluginManager()


@pytest.fixture
def change(tmp_path: Path) -> Callable[..., Path]:
    """A checkpoint whose tensors were edited by a function, kept in one safetensors file."""

    def make(edit: Callable[[dict[str, Tensor]], Any], **options: Any) -> Path:
        folder = make_checkpoint(tmp_path, **options)
        tensors = load_file(folder / ONE)
        edit(tensors)
        save_file({k: v.contiguous() for k, v in tensors.items()}, folder / ONE)
        return folder

    return make


def sharded(folder: Path, **options: Any) -> tuple[Path, dict[str, str]]:
    make_checkpoint(folder, shard_size="100KB", **options)
    index = json.loads((folder / f"{ONE}.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 2
    return folder, index


def refuse(folder: Path, plugins: PluginManager, *patterns: str) -> str:
    with pytest.raises(CheckpointError) as exc_info:
        TinyModel(folder, plugins)
    for pattern in patterns:
        assert re.search(pattern, str(exc_info.value)), f"{pattern!r} not in: {exc_info.value}"
    return str(exc_info.value)


# ----------------------------------------------------------------------- what must load


def test_shards_formats_and_prefused_checkpoints_are_one_model(
    tmp_path: Path, plugins: PluginManager
) -> None:
    single = make_checkpoint(tmp_path / "whole")
    expected = TinyModel(single, plugins).logits(IDS)
    many, _ = sharded(tmp_path / "many")
    assert torch.equal(TinyModel(many, plugins).logits(IDS), expected)

    tensors = load_file(single / ONE)
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text((single / "config.json").read_text())
    torch.save(tensors, pickled / "pytorch_model.bin")
    assert torch.equal(TinyModel(pickled, plugins, load_format="pt").logits(IDS), expected)

    for layer in range(3):
        home = f"model.layers.{layer}"
        for fused, names in (
            (f"{home}.self_attn.qkv_proj", [f"{home}.self_attn.{n}_proj" for n in "qkv"]),
            (f"{home}.mlp.gate_up_proj", [f"{home}.mlp.gate_proj", f"{home}.mlp.up_proj"]),
        ):
            tensors[f"{fused}.weight"] = torch.cat([tensors.pop(f"{n}.weight") for n in names])
    save_file(tensors, single / ONE)
    assert torch.equal(TinyModel(single, plugins).logits(IDS), expected)


def test_derived_tensors_of_old_exports_are_skipped(
    change: Callable[..., Path], plugins: PluginManager
) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    TinyModel(change(lambda t: t.update({name: torch.ones(8)})), plugins)


@pytest.mark.parametrize("order", ["head last", "head first"])
def test_a_tied_head_may_be_stored_too(tmp_path: Path, plugins: PluginManager, order: str) -> None:
    folder = make_checkpoint(tmp_path, tie_word_embeddings=True)
    expected = TinyModel(folder, plugins).logits(IDS)
    tensors = load_file(folder / ONE)
    assert "lm_head.weight" not in tensors
    head = torch.full_like(tensors["model.embed_tokens.weight"], 9.0)  # never to be used
    first = {"lm_head.weight": head}
    stored = {**first, **tensors} if order == "head first" else {**tensors, **first}
    model = TinyModel(folder, plugins)
    refill(model, stored)
    assert torch.equal(model.logits(IDS), expected)


def test_a_tied_embedding_may_be_stored_as_the_head(
    change: Callable[..., Path], plugins: PluginManager, tmp_path: Path
) -> None:
    def move(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    folder = change(move, tie_word_embeddings=True)
    usual = make_checkpoint(tmp_path / "other", tie_word_embeddings=True)
    assert torch.equal(
        TinyModel(folder, plugins).logits(IDS), TinyModel(usual, plugins).logits(IDS)
    )


class DictLoader:
    """A loader of tensors in memory, in their order."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.entries = tensors

    def tensors(self, should_load: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
        yield from ((name, t) for name, t in self.entries.items() if should_load(name))


def refill(model: TinyModel, tensors: dict[str, Tensor]) -> None:
    load_weights(model.model, model.spec, DictLoader(tensors), SingleRankCommunicator())


def test_the_order_of_tensors_does_not_matter(tmp_path: Path, plugins: PluginManager) -> None:
    folder = make_checkpoint(tmp_path, attention_bias=True)
    tensors = load_file(folder / ONE)
    model = TinyModel(folder, plugins)
    expected = model.logits(IDS)
    for order in (sorted(tensors), sorted(tensors, reverse=True)):
        for parameter in model.model.parameters():
            parameter.data.fill_(float("nan"))
        refill(model, {name: tensors[name] for name in order})
        assert torch.equal(model.logits(IDS), expected)


def test_nan_in_a_checkpoint_is_the_users_business(
    change: Callable[..., Path], plugins: PluginManager
) -> None:
    """A NaN in the row of an unused token must neither fail the load nor reach other tokens."""

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors["model.embed_tokens.weight"][300] = float("nan")

    assert TinyModel(change(spoil), plugins).logits(IDS).isfinite().all()


def test_no_uninitialised_memory_is_left(tmp_path: Path, plugins: PluginManager) -> None:
    """With fresh memory full of NaN, every parameter of every rank is finite after loading."""
    from treadle.testing.ranks import run_on_ranks

    folder = make_checkpoint(tmp_path, vocab_size=331, attention_bias=True)
    torch.use_deterministic_algorithms(True)  # which fills what torch.empty gives with NaN
    try:
        assert torch.empty(4).isnan().all()
        models = [TinyModel(folder, plugins).model]
        models += run_on_ranks(4, lambda c: TinyModel(folder, plugins, tp_group=c).model)
    finally:
        torch.use_deterministic_algorithms(False)
    for model in models:
        for name, parameter in model.named_parameters():
            assert parameter.isfinite().all(), name


# ------------------------------------------------------------------- what must be refused


def test_an_unknown_tensor(change: Callable[..., Path], plugins: PluginManager) -> None:
    folder = change(lambda t: t.update({"model.layers.0.extra.weight": torch.ones(2)}))
    text = refuse(
        folder, plugins, r"tensors without a parameter \(1\): model\.layers\.0\.extra\.weight"
    )
    assert "parameters without a tensor" not in text


def test_missing_tensors_are_named_as_the_checkpoint_would(
    change: Callable[..., Path], plugins: PluginManager
) -> None:
    def lose(tensors: dict[str, Tensor]) -> None:
        for name in (
            "model.layers.1.self_attn.k_proj.weight",
            "model.norm.weight",
            "lm_head.weight",
        ):
            tensors.pop(name)

    text = refuse(
        change(lose),
        plugins,
        r"parameters without a tensor \(3\): lm_head\.weight, "
        r"model\.layers\.1\.self_attn\.k_proj\.weight, model\.norm\.weight",
    )
    assert "q_proj" not in text


def test_a_bias_that_the_configuration_does_not_know(
    tmp_path: Path, plugins: PluginManager
) -> None:
    folder = make_checkpoint(tmp_path, attention_bias=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attention_bias": False}))
    refuse(folder, plugins, r"tensors without a parameter \(12\)", "self_attn.k_proj.bias")


def test_a_wrong_shape_names_file_tensor_and_both_shapes(
    change: Callable[..., Path], plugins: PluginManager
) -> None:
    def shrink(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.2.mlp.up_proj.weight"] = torch.ones(95, 64)

    refuse(
        change(shrink),
        plugins,
        r"model\.layers\.2\.mlp\.up_proj\.weight in .*model\.safetensors is float32 \[95, 64\]",
        r"gate_up_proj\.weight float32 \[192, 64\]: expected shape \[96, 64\]",
    )


def test_a_wrong_dtype(change: Callable[..., Path], plugins: PluginManager) -> None:
    def quantize(tensors: dict[str, Tensor]) -> None:
        name = "model.layers.0.mlp.down_proj.weight"
        tensors[name] = tensors[name].to(torch.int8)

    refuse(change(quantize), plugins, r"is int8 \[64, 96\].*expected dtype float32")


def test_a_matrix_given_fused_and_alone(
    change: Callable[..., Path], plugins: PluginManager
) -> None:
    def double(tensors: dict[str, Tensor]) -> None:
        home = "model.layers.0.self_attn"
        tensors[f"{home}.qkv_proj.weight"] = torch.cat(
            [tensors[f"{home}.{n}_proj.weight"] for n in "qkv"]
        )

    refuse(change(double), plugins, "a second time")


def test_a_configuration_of_another_size(tmp_path: Path, plugins: PluginManager) -> None:
    folder = make_checkpoint(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 400}))
    refuse(
        folder,
        plugins,
        r"float32 \[320, 64\].*expected shape \[400, 64\]",
        "config.json belongs to",
    )


# ------------------------------------------- what quantization and expert plugins rely on


class Block(nn.Module):
    """Parameters of every kind that a plugin may make."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = empty_weight([2], torch.float32, per_part=True)
        self.order = empty_weight([4], torch.int32, input_dim=0)
        self.extra = empty_weight([2], torch.float32, default=7.0)
        set_shards([self.scales, self.order], [Shard.full(4), Shard.full(4)], Shard.full(4))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = empty_weight([3, 2, 4], torch.float32, output_dim=0, input_dim=1, stack=3)
        set_shards([self.up], [Shard.full(2)], Shard.full(4))

    def locate(self, rest: str) -> WeightTarget | None:
        index, _, leaf = rest.partition(".")
        return WeightTarget("up", None, int(index)) if leaf == "w1.weight" else None


SPEC = ModelSpec("Test", Block, packed_modules_mapping={"block": ("one", "two")})  # type: ignore[arg-type]


def filled(module: nn.Module, tensors: dict[str, Tensor], **options: Any) -> nn.Module:
    root = nn.Module()
    root.block = module
    load_weights(root, SPEC, DictLoader(tensors), SingleRankCommunicator(), **options)
    return module


ORDER = torch.tensor([3, 2, 1, 0], dtype=torch.int32)
QUANTIZED = {
    "one.scales": torch.tensor(1.0),
    "two.scales": torch.tensor([2.0]),
    "two.order": ORDER,
    "one.order": ORDER,
}


def test_scalars_permutations_and_defaults() -> None:
    block: Any = filled(Block(), QUANTIZED)
    assert block.scales.tolist() == [1.0, 2.0]
    assert block.order.tolist() == [3, 2, 1, 0]
    assert block.extra.tolist() == [7.0, 7.0]
    with_extra: Any = filled(Block(), {**QUANTIZED, "block.extra": torch.tensor([1.0, 2.0])})
    assert with_extra.extra.tolist() == [1.0, 2.0]


def test_fused_matrices_must_agree_on_their_permutation() -> None:
    with pytest.raises(CheckpointError, match=r"one\.order .* they differ"):
        filled(Block(), {**QUANTIZED, "one.order": ORDER.flip(0)})


def test_a_scheme_may_rename_and_drop() -> None:
    stored = {f"x.{name.replace('scales', 'weight_scale')}": t for name, t in QUANTIZED.items()}
    stored["x.unused"] = torch.ones(1)

    def rename(name: str) -> str | None:
        return None if name == "x.unused" else name[2:].replace("weight_scale", "scales")

    block: Any = filled(Block(), stored, rename=rename)
    assert block.scales.tolist() == [1.0, 2.0]


def test_a_module_may_find_its_own_tensors() -> None:
    tensors = {f"block.{i}.w1.weight": torch.full((2, 4), float(i)) for i in range(3)}
    experts: Any = filled(Experts(), tensors)
    assert experts.up[:, 0, 0].tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(CheckpointError, match=r"block\.0\.w2\.weight"):
        filled(Experts(), {**tensors, "block.0.w2.weight": torch.ones(1)})
    tensors.pop("block.1.w1.weight")
    with pytest.raises(
        CheckpointError, match=r"parameters without a tensor \(1\): block\.up \(of 1\)"
    ):
        filled(Experts(), tensors)


def test_prefixes_are_renamed_and_patterns_ignored() -> None:
    spec = ModelSpec(
        "Test",
        Block,  # type: ignore[arg-type]
        packed_modules_mapping=SPEC.packed_modules_mapping,
        weight_prefix_map={"language_model.": ""},
        ignored_weights=("vision.*",),
    )
    root = nn.Module()
    root.block = Block()
    tensors = {f"language_model.{name}": t for name, t in QUANTIZED.items()}
    tensors["vision.patch"] = torch.ones(1)
    load_weights(root, spec, DictLoader(tensors), SingleRankCommunicator())
    assert root.block.scales.tolist() == [1.0, 2.0]


def test_layers_are_finished_after_loading(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    finished: list[str] = []
    monkeypatch.setattr(
        PlainLinear,
        "process_weights_after_loading",
        lambda self, module: finished.append(module.prefix),
    )
    model = TinyModel(make_checkpoint(tmp_path), PluginManager())
    linears = [m.prefix for m in model.model.modules() if isinstance(m, Linear)]
    assert finished == linears
    assert len(linears) == 3 * 4 + 1
