"""treadle-gemma against transformers: the same logits for the same tiny random checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from treadle.errors import CheckpointError, UnsupportedModelError
from treadle.plugins import PluginManager
from treadle.testing.checkpoints import TINY, draw_weights, make_checkpoint
from treadle.testing.models import TinyModel, transformers_logits
from treadle.testing.ranks import run_on_ranks

IDS = torch.randint(0, 256, (45,), generator=torch.Generator().manual_seed(7))
GEMMA2 = {
    "sliding_window": 7,
    "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
}
GEMMA3 = {
    "sliding_window": 7,
    "query_pre_attn_scalar": 24,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    },
}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("GemmaForCausalLM", {}),
    ("GemmaForCausalLM", {"head_dim": 32, "num_key_value_heads": 1, "attention_bias": True}),
    ("Gemma2ForCausalLM", GEMMA2),
    ("Gemma2ForCausalLM", {**GEMMA2, "tie_word_embeddings": False, "attention_bias": True}),
    ("Gemma2ForCausalLM", {**GEMMA2, "attn_logit_softcapping": None}),
    ("Gemma2ForCausalLM", {**GEMMA2, "final_logit_softcapping": None, "head_dim": 24}),
    ("Gemma3ForCausalLM", GEMMA3),
    ("Gemma3ForCausalLM", {**GEMMA3, "final_logit_softcapping": 3.0, "head_dim": 32}),
    ("Gemma3ForCausalLM", {"sliding_window": 5, "num_hidden_layers": 7}),
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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attn_logit_softcapping", None),
        ("final_logit_softcapping", 2.0),
        ("query_pre_attn_scalar", 16),
        ("sliding_window", 8),
        ("hidden_activation", "silu"),
    ],
)
def test_every_field_of_gemma_2_matters(
    tmp_path: Path, plugins: PluginManager, field: str, value: Any
) -> None:
    folder = make_checkpoint(tmp_path, "Gemma2ForCausalLM", **GEMMA2)
    before = TinyModel(folder, plugins).logits(IDS)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, field: value}))
    assert (TinyModel(folder, plugins).logits(IDS) - before).abs().max() > 0.02


def test_layers_say_which_of_them_slide_and_how_they_turn(
    tmp_path: Path, plugins: PluginManager
) -> None:
    folder = make_checkpoint(tmp_path, "Gemma3ForCausalLM", **GEMMA3)
    model = TinyModel(folder, plugins)
    assert [layer.spec.window for layer in model.attentions] == [7, 7, None]
    tables = [layer.self_attn.rotary for layer in model.model.model.layers]
    assert tables[0] is tables[1] is not tables[2]
    # The second pair: 10000 ** (-2 / 16), and 1000000 ** (-2 / 16) / 8.
    assert [float(t.inv_freq[1]) for t in tables[1:]] == pytest.approx([0.316228, 0.0222285])


@pytest.mark.parametrize(("architecture", "changes"), [VARIANTS[0], VARIANTS[2], VARIANTS[6]])
def test_steps_do_not_change_a_sequence(
    tmp_path: Path, plugins: PluginManager, architecture: str, changes: dict[str, Any]
) -> None:
    model = TinyModel(make_checkpoint(tmp_path, architecture, **changes), plugins)
    expected = model.logits(IDS)
    torch.testing.assert_close(model.logits(IDS, [3, 27] + [1] * 15), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("architecture", "changes"), [VARIANTS[0], VARIANTS[3], VARIANTS[7]])
def test_tensor_parallel_equals_one_rank(
    tmp_path: Path, plugins: PluginManager, architecture: str, changes: dict[str, Any]
) -> None:
    folder = make_checkpoint(tmp_path, architecture, **changes)
    expected = TinyModel(folder, plugins).logits(IDS)
    for ranks in (2, 4):
        for logits in run_on_ranks(
            ranks, lambda c: TinyModel(folder, plugins, tp_group=c).logits(IDS)
        ):
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_bfloat16_stays_close_to_transformers(tmp_path: Path, plugins: PluginManager) -> None:
    folder = make_checkpoint(tmp_path, "Gemma3ForCausalLM", dtype=torch.bfloat16, **GEMMA3)
    exact = transformers_logits(folder, IDS)
    reference = transformers_logits(folder, IDS, torch.bfloat16)
    actual = TinyModel(folder, plugins, dtype=torch.bfloat16).logits(IDS)
    assert (actual - exact).abs().mean() < 1.5 * (reference - exact).abs().mean()


def test_the_embedding_is_scaled_by_a_rounded_root(tmp_path: Path, plugins: PluginManager) -> None:
    folder = make_checkpoint(tmp_path, "GemmaForCausalLM", hidden_size=96, dtype=torch.bfloat16)
    assert TinyModel(folder, plugins).model.model.scale == pytest.approx(96**0.5)
    assert TinyModel(folder, plugins, dtype=torch.bfloat16).model.model.scale == 9.8125


# ------------------------------------------------------------------ with a vision tower beside it


def images(folder: Path) -> Path:
    """A checkpoint of ``Gemma3ForConditionalGeneration``, as transformers writes it."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {**TINY, **GEMMA3, "head_dim": 16}
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    config = Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=319,
        architectures=["Gemma3ForConditionalGeneration"],
    )
    model = Gemma3ForConditionalGeneration(config)
    draw_weights(model)
    model.eval().save_pretrained(folder)
    return folder


def renamed(folder: Path, change: Any) -> set[str]:
    weights = load_file(folder / "model.safetensors")
    changed = {change(name): tensor for name, tensor in weights.items()}
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    return set(changed)


def test_the_text_part_of_a_model_that_sees_images(tmp_path: Path, plugins: PluginManager) -> None:
    folder = images(tmp_path)
    expected = transformers_logits(folder, IDS)
    torch.testing.assert_close(TinyModel(folder, plugins).logits(IDS), expected, atol=1e-4, rtol=0)

    # transformers 4 wrote ``language_model.model.…``, transformers 5 ``model.language_model.…``.
    def published(name: str) -> str:
        name = name.replace("model.language_model.", "language_model.model.")
        return name.removeprefix("model.")

    def saved_name(name: str) -> str:
        name = name.replace("language_model.model.", "model.language_model.")
        return name if name.startswith(("model.", "lm_head")) else f"model.{name}"

    for change, sample in (
        (published, "language_model.model.norm.weight"),
        (saved_name, "model.language_model.norm.weight"),
    ):
        assert sample in renamed(folder, change)
        torch.testing.assert_close(
            TinyModel(folder, plugins).logits(IDS), expected, atol=1e-4, rtol=0
        )


def test_tensors_of_neither_part_are_not_passed_over(
    tmp_path: Path, plugins: PluginManager
) -> None:
    folder = images(tmp_path)
    renamed(folder, lambda name: name.replace("multi_modal_projector", "audio_projector"))
    with pytest.raises(CheckpointError, match="audio_projector"):
        TinyModel(folder, plugins)


def test_an_encoder_is_refused(tmp_path: Path, plugins: PluginManager) -> None:
    folder = make_checkpoint(
        tmp_path, "Gemma3ForCausalLM", use_bidirectional_attention=True, **GEMMA3
    )
    with pytest.raises(UnsupportedModelError, match="use_bidirectional_attention"):
        TinyModel(folder, plugins)


def test_the_hook_leaves_other_architectures_alone() -> None:
    import treadle_gemma

    assert treadle_gemma.treadle_model("LlamaForCausalLM", None) is None
    assert treadle_gemma.treadle_model("Gemma3nForCausalLM", None) is None
