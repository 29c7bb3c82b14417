"""treadle-llama against transformers: the same logits for the same tiny random checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from treadle.plugins import PluginManager
from treadle.testing.checkpoints import make_checkpoint
from treadle.testing.models import TinyModel, transformers_logits
from treadle.testing.ranks import run_on_ranks

LENGTH = 45
IDS = torch.randint(0, 256, (LENGTH,), generator=torch.Generator().manual_seed(5))


def rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **values}}


LONG = rope(
    "longrope",
    short_factor=[1.0 + 0.1 * i for i in range(8)],
    long_factor=[1.0 + 0.7 * i for i in range(8)],
    original_max_position_embeddings=32,
)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "head_dim": {"head_dim": 24},
    "one kv head": {"num_key_value_heads": 1},
    "no sharing of kv heads": {"num_key_value_heads": 4},
    "gelu": {"hidden_act": "gelu_pytorch_tanh"},
    "odd vocabulary": {"vocab_size": 331},
    "theta": rope("default", rope_theta=500_000.0),
    "linear": rope("linear", factor=4.0),
    "dynamic, short": rope("dynamic", factor=4.0),
    "yarn": rope("yarn", factor=4.0, original_max_position_embeddings=32),
    "yarn, all options": rope(
        "yarn",
        factor=8.0,
        original_max_position_embeddings=32,
        beta_fast=16.0,
        beta_slow=2.0,
        mscale=0.7,
        mscale_all_dim=0.4,
        truncate=False,
    ),
    "llama3": rope(
        "llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=32,
    ),
    "longrope, long": LONG,
}


@pytest.fixture(scope="module")
def plugins() -> PluginManager:
    return PluginManager()


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_logits_equal_transformers(
    tmp_path: Path, plugins: PluginManager, changes: dict[str, Any]
) -> None:
    folder = make_checkpoint(tmp_path, "LlamaForCausalLM", **changes)
    expected = transformers_logits(folder, IDS)
    actual = TinyModel(folder, plugins).logits(IDS)
    assert expected.std() > 0.5, "logits too uniform to show a mistake"
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


def test_dynamic_scaling_is_that_of_the_longest_sequence(
    tmp_path: Path, plugins: PluginManager
) -> None:
    """transformers scales by the sequence at hand; an engine for sequences of that length agrees."""
    folder = make_checkpoint(tmp_path, max_position_embeddings=16, **rope("dynamic", factor=4.0))
    expected = transformers_logits(folder, IDS)
    actual = TinyModel(folder, plugins, model_len=LENGTH).logits(IDS)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)
    unscaled = TinyModel(folder, plugins).logits(IDS)
    assert (unscaled - expected).abs().max() > 0.1


def test_longrope_of_a_short_engine_uses_the_short_factors(
    tmp_path: Path, plugins: PluginManager
) -> None:
    folder = make_checkpoint(tmp_path, **LONG)
    ids = IDS[:30]
    expected = transformers_logits(folder, ids)
    short = TinyModel(folder, plugins, model_len=32).logits(ids)
    long = TinyModel(folder, plugins).logits(ids)
    torch.testing.assert_close(short, expected, atol=1e-4, rtol=0)
    assert (long - expected).abs().max() > 0.1


@pytest.mark.parametrize("window", [1, 7, 44, 45, None])
def test_mistral_equals_transformers(
    tmp_path: Path, plugins: PluginManager, window: int | None
) -> None:
    folder = make_checkpoint(tmp_path, "MistralForCausalLM", sliding_window=window)
    expected = transformers_logits(folder, IDS)
    actual = TinyModel(folder, plugins).logits(IDS)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


def test_a_window_that_no_sequence_reaches_is_full_attention(
    tmp_path: Path, plugins: PluginManager
) -> None:
    folder = make_checkpoint(tmp_path, "MistralForCausalLM", sliding_window=64)
    assert {a.spec.kind for a in TinyModel(folder, plugins).attentions} == {"sliding"}
    assert {a.spec.kind for a in TinyModel(folder, plugins, model_len=65).attentions} == {"sliding"}
    assert {a.spec.kind for a in TinyModel(folder, plugins, model_len=64).attentions} == {"full"}


def test_a_llama_by_another_name(tmp_path: Path, plugins: PluginManager) -> None:
    """Checkpoints that name the architecture but a model_type that transformers does not know."""
    folder = make_checkpoint(tmp_path)
    expected = TinyModel(folder, plugins).logits(IDS)
    config = json.loads((folder / "config.json").read_text())
    for key in ("attention_bias", "mlp_bias", "head_dim", "rope_parameters"):
        config.pop(key)
    config |= {"model_type": "of tomorrow", "rope_theta": 10_000.0}
    (folder / "config.json").write_text(json.dumps(config))
    assert torch.equal(TinyModel(folder, plugins).logits(IDS), expected)


def test_steps_and_neighbours_do_not_change_a_sequence(
    tmp_path: Path, plugins: PluginManager
) -> None:
    folder = make_checkpoint(tmp_path, "MistralForCausalLM", sliding_window=9)
    model = TinyModel(folder, plugins)
    expected, expected_short = model.logits(IDS), model.logits(IDS[:20])
    torch.testing.assert_close(model.logits(IDS, [16, 20] + [1] * 9), expected, atol=5e-5, rtol=0)
    first, second = model.batch([IDS, IDS[:20]], [[1] * 45, [13, 7]])
    torch.testing.assert_close(first, expected, atol=5e-5, rtol=0)
    torch.testing.assert_close(second, expected_short, atol=5e-5, rtol=0)


@pytest.mark.parametrize(("ranks", "kv_heads"), [(2, 2), (2, 4), (4, 2), (4, 1)])
def test_tensor_parallel_equals_one_rank(
    tmp_path: Path, plugins: PluginManager, ranks: int, kv_heads: int
) -> None:
    changes = {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": kv_heads}
    folder = make_checkpoint(tmp_path, vocab_size=331, shard_size="100KB", **changes)
    expected = TinyModel(folder, plugins).logits(IDS)
    together = run_on_ranks(ranks, lambda c: TinyModel(folder, plugins, tp_group=c).logits(IDS))
    for logits in together:
        torch.testing.assert_close(logits, expected, atol=2e-5, rtol=0)


def test_bfloat16_stays_close_to_transformers(tmp_path: Path, plugins: PluginManager) -> None:
    folder = make_checkpoint(tmp_path, dtype=torch.bfloat16)
    exact = transformers_logits(folder, IDS)
    reference = transformers_logits(folder, IDS, torch.bfloat16)
    actual = TinyModel(folder, plugins, dtype=torch.bfloat16).logits(IDS)
    assert (actual - exact).abs().mean() < 1.5 * (reference - exact).abs().mean()


def test_the_hook_leaves_other_architectures_alone() -> None:
    import treadle_llama

    assert treadle_llama.treadle_model("Qwen2ForCausalLM", None) is None
    spec = treadle_llama.treadle_model("LlamaForCausalLM", None)
    assert spec is not None
    assert spec.packed_modules_mapping["qkv_proj"] == ("q_proj", "k_proj", "v_proj")
