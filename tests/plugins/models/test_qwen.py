"""treadle-qwen against transformers: the same logits for the same tiny random checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from treadle.plugins import PluginManager
from treadle.testing.checkpoints import make_checkpoint
from treadle.testing.models import TinyModel, transformers_logits
from treadle.testing.ranks import run_on_ranks

IDS = torch.randint(0, 256, (45,), generator=torch.Generator().manual_seed(6))
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("Qwen2ForCausalLM", {}),
    ("Qwen2ForCausalLM", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    ("Qwen2ForCausalLM", {"use_sliding_window": False, "sliding_window": 6}),
    (
        "Qwen2ForCausalLM",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    ("Qwen2ForCausalLM", {"rope_parameters": {**YARN, "original_max_position_embeddings": 32}}),
    ("Qwen3ForCausalLM", {}),
    ("Qwen3ForCausalLM", {"head_dim": 32, "tie_word_embeddings": True}),
    ("Qwen3ForCausalLM", {"attention_bias": True, "head_dim": 8}),
    ("Qwen3ForCausalLM", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}),
    ("Qwen3ForCausalLM", {"rope_parameters": {**YARN, "original_max_position_embeddings": 64}}),
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


def test_layers_say_which_of_them_slide(tmp_path: Path, plugins: PluginManager) -> None:
    changes = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}
    folder = make_checkpoint(tmp_path, "Qwen2ForCausalLM", **changes)
    windows = [layer.spec.window for layer in TinyModel(folder, plugins).attentions]
    assert windows == [None, None, 6]


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_tensor_parallel_equals_one_rank(
    tmp_path: Path, plugins: PluginManager, architecture: str
) -> None:
    folder = make_checkpoint(tmp_path, architecture, tie_word_embeddings=True)
    expected = TinyModel(folder, plugins).logits(IDS)
    for ranks in (2, 4):
        for logits in run_on_ranks(
            ranks, lambda c: TinyModel(folder, plugins, tp_group=c).logits(IDS)
        ):
            torch.testing.assert_close(logits, expected, atol=2e-5, rtol=0)


def test_steps_do_not_change_a_sequence(tmp_path: Path, plugins: PluginManager) -> None:
    folder = make_checkpoint(tmp_path, "Qwen3ForCausalLM")
    model = TinyModel(folder, plugins)
    expected = model.logits(IDS)
    torch.testing.assert_close(model.logits(IDS, [30] + [1] * 15), expected, atol=5e-5, rtol=0)


def test_the_hook_leaves_other_architectures_alone() -> None:
    import treadle_qwen

    assert treadle_qwen.treadle_model("LlamaForCausalLM", None) is None
