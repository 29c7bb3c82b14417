"""treadle-mixtral, and Qwen 3 MoE, against transformers: the same logits for the same checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from treadle.plugins import PluginManager
from treadle.testing.checkpoints import make_checkpoint
from treadle.testing.models import TinyModel, transformers_logits
from treadle.testing.ranks import run_on_ranks

IDS = torch.randint(0, 256, (45,), generator=torch.Generator().manual_seed(8))
QWEN = {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("MixtralForCausalLM", {}),
    ("MixtralForCausalLM", {"num_local_experts": 5, "num_experts_per_tok": 1}),
    ("MixtralForCausalLM", {"sliding_window": 7, "tie_word_embeddings": True}),
    ("Qwen3MoeForCausalLM", QWEN),
    ("Qwen3MoeForCausalLM", {**QWEN, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    ("Qwen3MoeForCausalLM", {**QWEN, "decoder_sparse_step": 2, "attention_bias": True}),
    ("Qwen3MoeForCausalLM", {**QWEN, "use_sliding_window": True, "sliding_window": 6}),
]


@pytest.fixture(scope="module")
def plugins() -> PluginManager:
    return PluginManager()


@pytest.mark.parametrize(("architecture", "changes"), VARIANTS)
def test_logits_equal_transformers(
    tmp_path: Path, plugins: PluginManager, architecture: str, changes: dict[str, Any]
) -> None:
    folder = make_checkpoint(tmp_path, architecture, **changes)
    expected = transformers_logits(folder, IDS)
    actual = TinyModel(folder, plugins).logits(IDS)
    assert expected.std() > 0.5, "logits too uniform to show a mistake"
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


def test_the_checkpoint_has_the_names_that_are_published(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "MixtralForCausalLM")
    names = load_file(folder / "model.safetensors")
    assert "model.layers.0.block_sparse_moe.experts.7.w3.weight" in names
    assert "model.layers.0.block_sparse_moe.gate.weight" in names


def test_names_of_transformers_5_load_as_well(tmp_path: Path, plugins: PluginManager) -> None:
    from transformers import AutoModelForCausalLM

    folder = make_checkpoint(tmp_path / "a", "MixtralForCausalLM")
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "b", save_original_format=False)
    names = load_file(tmp_path / "b" / "model.safetensors")
    assert "model.layers.0.mlp.experts.gate_up_proj" in names
    expected = TinyModel(folder, plugins).logits(IDS)
    assert torch.equal(TinyModel(tmp_path / "b", plugins).logits(IDS), expected)


@pytest.mark.parametrize(("architecture", "changes"), [VARIANTS[0], VARIANTS[4]])
def test_tensor_parallel_equals_one_rank(
    tmp_path: Path, plugins: PluginManager, architecture: str, changes: dict[str, Any]
) -> None:
    folder = make_checkpoint(tmp_path, architecture, shard_size="100KB", **changes)
    expected = TinyModel(folder, plugins).logits(IDS)
    for ranks in (2, 4):
        for logits in run_on_ranks(
            ranks, lambda c: TinyModel(folder, plugins, tp_group=c).logits(IDS)
        ):
            torch.testing.assert_close(logits, expected, atol=5e-5, rtol=0)


@pytest.mark.parametrize(("architecture", "changes"), [VARIANTS[2], VARIANTS[3]])
def test_steps_and_neighbours_do_not_change_a_sequence(
    tmp_path: Path, plugins: PluginManager, architecture: str, changes: dict[str, Any]
) -> None:
    model = TinyModel(make_checkpoint(tmp_path, architecture, **changes), plugins)
    expected, expected_short = model.logits(IDS), model.logits(IDS[:20])
    first, second = model.batch([IDS, IDS[:20]], [[16, 20] + [1] * 9, [13, 7]])
    torch.testing.assert_close(first, expected, atol=5e-5, rtol=0)
    torch.testing.assert_close(second, expected_short, atol=5e-5, rtol=0)


def test_bfloat16_stays_close_to_transformers(tmp_path: Path, plugins: PluginManager) -> None:
    folder = make_checkpoint(tmp_path, "MixtralForCausalLM", dtype=torch.bfloat16)
    exact = transformers_logits(folder, IDS)
    reference = transformers_logits(folder, IDS, torch.bfloat16)
    actual = TinyModel(folder, plugins, dtype=torch.bfloat16).logits(IDS)
    assert (actual - exact).abs().mean() < 1.5 * (reference - exact).abs().mean()


def test_the_hook_leaves_other_architectures_alone() -> None:
    import treadle_mixtral

    assert treadle_mixtral.treadle_model("MistralForCausalLM", None) is None
