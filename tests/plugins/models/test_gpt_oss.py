"""treadle-gpt-oss against transformers: the same numbers from its own checkpoints, and from those in MXFP4."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_formats.mxfp4 import Mxfp4Format
from safetensors.torch import load_file, save_file

from treadle.api.sampling_params import SamplingParams
from treadle.entrypoints.llm import LLM
from treadle.errors import TreadleError
from treadle.plugins import PluginManager
from treadle.testing.architectures import ModelSuite
from treadle.testing.checkpoints import make_checkpoint
from treadle.testing.models import TinyModel
from treadle.testing.plugin import PluginSuite
from treadle.testing.ranks import run_on_ranks

ARCHITECTURE = "GptOssForCausalLM"
SIZES: dict[str, Any] = {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 7}
IDS = torch.randint(0, 256, (45,), generator=torch.Generator().manual_seed(8))


class TestGptOss(PluginSuite, ModelSuite):
    plugin = "models:GptOssForCausalLM"
    variants = {
        "plain": SIZES,
        "wide": {**SIZES, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 16},
        "tied": {**SIZES, "tie_word_embeddings": True, "attention_bias": False},
        "one expert": {**SIZES, "num_experts_per_tok": 1, "swiglu_limit": 0.5},
    }


PUBLISHED: dict[str, Any] = {
    "architectures": [ARCHITECTURE], "model_type": "gpt_oss", "attention_bias": True, "attention_dropout": 0.0,
    "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
    "initial_context_length": 4096, "initializer_range": 0.02, "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
    "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
    "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199999, "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": False, "transformers_version": "4.55.0.dev0", "use_cache": True, "vocab_size": 201088,
}  # fmt: skip


@pytest.mark.parametrize("missing", [(), ("rope_theta",), ("rope_scaling", "rope_theta")])
def test_published_configurations_are_read_without_transformers(missing: tuple[str, ...]) -> None:
    import treadle_gpt_oss
    from transformers import GptOssConfig

    raw = {name: value for name, value in PUBLISHED.items() if name not in missing}
    found = treadle_gpt_oss.treadle_model_config(raw)
    config = GptOssConfig.from_dict(deepcopy(raw))
    assert found == {name: getattr(config, name, None) for name in found or {}}


@pytest.mark.parametrize(
    "change",
    [
        {"layer_types": None},
        {"max_position_embeddings": 4096},
        {"rope_scaling": {**PUBLISHED["rope_scaling"], "truncate": 1}},
        {"rope_scaling": {**PUBLISHED["rope_scaling"], "beta_slow": 64.0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 32.0}},
        {"sliding_window": -1},
    ],
)
def test_what_is_not_ordinary_is_left_to_transformers(change: dict[str, Any]) -> None:
    import treadle_gpt_oss

    assert treadle_gpt_oss.treadle_model_config({**PUBLISHED, **change}) is None


def in_mxfp4(source: Path, folder: Path) -> Path:
    """Store the experts as published checkpoints do: blocks ``[experts, out, in / 32, 16]``."""
    folder.mkdir()
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = tensor.bfloat16()
            continue
        packed = [Mxfp4Format().pack(matrix.t().contiguous()).tensors for matrix in tensor]
        for leaf in ("blocks", "scales"):
            tensors[f"{name}_{leaf}"] = torch.stack([p[f"weight_{leaf}"] for p in packed])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
        ],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def of_transformers(folder: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", **options)
    return model.eval()


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt_oss")
    source = make_checkpoint(folder / "source", ARCHITECTURE, tokenizer=True, **SIZES)
    return in_mxfp4(source, folder / "mxfp4")


def test_a_checkpoint_in_mxfp4_is_what_transformers_makes_of_it(mxfp4: Path) -> None:
    from transformers import Mxfp4Config

    options = {"quantization_config": Mxfp4Config(dequantize=True), "dtype": torch.float32}
    with torch.no_grad():
        expected = of_transformers(mxfp4, **options)(IDS[None]).logits[0]
    plugins = PluginManager()
    torch.testing.assert_close(TinyModel(mxfp4, plugins).logits(IDS), expected, atol=2e-4, rtol=0)

    def work(tp_group: Any) -> torch.Tensor:
        return TinyModel(mxfp4, plugins, tp_group=tp_group).logits(IDS)

    with pytest.raises(TreadleError, match="blocks of 32"):
        run_on_ranks(2, work)


def test_ranks_share_blocks(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", ARCHITECTURE, **SIZES, intermediate_size=64)
    folder, plugins = in_mxfp4(source, tmp_path / "mxfp4"), PluginManager()
    expected = TinyModel(folder, plugins).logits(IDS)
    for logits in run_on_ranks(2, lambda r: TinyModel(folder, plugins, tp_group=r).logits(IDS)):
        torch.testing.assert_close(logits, expected, atol=5e-5, rtol=0)


def test_an_engine_generates_what_transformers_does(tmp_path: Path) -> None:
    """Through the public class, with the attention of a CPU, beyond the windows."""
    folder = make_checkpoint(tmp_path, ARCHITECTURE, tokenizer=True, **SIZES)
    prompts = [IDS[:30].tolist(), IDS[:3].tolist(), IDS[5:25].tolist()]
    reference = of_transformers(folder)
    with LLM(str(folder), dtype="float32", device="cpu") as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    for ids, output in zip(prompts, outputs, strict=True):
        expected = reference.generate(
            torch.tensor([ids]), max_new_tokens=12, min_new_tokens=12, do_sample=False
        )
        assert list(output.outputs[0].token_ids) == expected[0, len(ids) :].tolist()


def test_a_method_without_stacks_is_refused_by_name(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, ARCHITECTURE, **SIZES)
    with pytest.raises(TreadleError, match="all experts of a layer in one tensor"):
        TinyModel(folder, PluginManager(), quantization="fp8")


def test_the_hook_leaves_other_architectures_alone() -> None:
    import treadle_gpt_oss

    assert treadle_gpt_oss.treadle_model("MixtralForCausalLM", None) is None
