"""Configurations that are read without transformers are those that transformers reads."""

from __future__ import annotations

import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING
from treadle_llama.config import FIELDS as LLAMA
from treadle_mixtral.config import FIELDS as MIXTRAL
from treadle_qwen.config import FIELDS as QWEN

from treadle.api.files import ModelFiles
from treadle.config import PluginConfig
from treadle.errors import CheckpointError
from treadle.plugins import PluginManager
from treadle_layers_kit.model_config import read_fields
from treadle_worker_kit.model_config import PlainConfig, read_config

FIELDS = {**LLAMA, **MIXTRAL, **QWEN}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 1024,
}
# Values of one field after another, in the spellings of transformers 4 and 5.
ORDINARY: list[dict[str, Any]] = [
    {},
    {"hidden_size": 64, "num_attention_heads": 4},
    {"num_key_value_heads": 2, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
    {"rope_theta": 500000.0, "rope_scaling": None},
    {"rope_theta": 1000000, "rope_parameters": None},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}},
    {"rope_theta": 3.0, "rope_parameters": {"rope_theta": 7.0}},
    {"rope_scaling": LLAMA3, "rope_theta": 5e5},
    {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
    {"torch_dtype": "float16"},
    {"dtype": "bfloat16", "torch_dtype": "float16", "transformers_version": "4.51.0"},
    {"eos_token_id": [3, 4], "bos_token_id": None, "pad_token_id": 0},
    {"architectures": ["LlamaForCausalLM"], "use_cache": False, "hidden_act": "gelu"},
    {"quantization_config": {"quant_method": "fp8"}},
]
WINDOWS: list[dict[str, Any]] = [
    {"sliding_window": None},
    {"use_sliding_window": True, "max_window_layers": 3, "num_hidden_layers": 5},
    {"use_sliding_window": True, "sliding_window": None},
    {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
]
# What is left to transformers, to be read, warned about or refused.
UNUSUAL: list[dict[str, Any]] = [
    {"hidden_size": "wide"},
    {"hidden_size": 64.0},
    {"hidden_size": -64},
    {"hidden_size": 100, "num_attention_heads": 3},
    {"num_attention_heads": 0},
    {"num_hidden_layers": True},
    {"rms_norm_eps": None},
    {"use_cache": 1},
    {"unknown": 1},
    {"auto_map": {"AutoConfig": "code.Config"}},
    {"temperature": 0.5},
    {"dtype": "int4"},
    {"pad_token_id": -1},
    {"eos_token_id": "2"},
    {"eos_token_id": [2.0]},
    {"initializer_range": 2.0},
    {"initializer_range": -1.0},
    {"chunk_size_feed_forward": "wide"},
    {"architectures": "LlamaForCausalLM"},
    {"rope_theta": "large"},
    {"rope_scaling": [1]},
    {"rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    {"rope_parameters": {"rope_type": "default", "factor": 2.0}},
    {"rope_parameters": {"rope_type": ["default"]}},
    {"rope_parameters": {**LLAMA3, "factor": "8"}},
    {"rope_parameters": {**LLAMA3, "factor": 0.5}},
    {"rope_parameters": {**LLAMA3, "low_freq_factor": 4.0}},
    {"partial_rotary_factor": 0.5},
    {"mlp_only_layers": ["1"]},
]


# What no causal language model uses.
IGNORED = {"model_type", "id2label", "label2id", "problem_type", "chunk_size_feed_forward"}


def without_fallback() -> PluginManager:
    """A manager that knows no plugin for an architecture of no name."""
    return PluginManager(PluginConfig(disable_plugin=["treadle-transformers"]))


def described(config: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(config).items() if not name.startswith("_")}


@pytest.mark.parametrize("kind", FIELDS)
def test_it_equals_that_of_transformers(kind: str) -> None:
    for changes in [*ORDINARY, *WINDOWS]:
        raw = {"model_type": kind, **changes}
        values = read_fields(deepcopy(raw), FIELDS)
        if values is None:
            assert changes in WINDOWS and not changes.keys() <= FIELDS[kind].keys(), changes
            continue
        config = PlainConfig(values)
        expected, found = CONFIG_MAPPING[kind].from_dict(raw), described(config)
        assert found.pop("model_type") == kind
        dtype = found.pop("dtype")
        assert (dtype and getattr(torch, dtype)) == expected.dtype
        # Qwen3-MoE's class lacks what its checkpoints have.
        optional = {"head_dim", "max_window_layers"} if kind == "qwen3_moe" else set()
        wanted = {name: getattr(expected, name) for name in found if name not in optional}
        assert wanted == {name: found[name] for name in wanted}, changes
        known = {name for name, value in described(expected).items() if value is not None}
        known -= {CONFIG_MAPPING[kind].attribute_map.get(name) for name in found}
        missing = known - found.keys() - {"dtype"}
        assert missing <= IGNORED
        assert config.get_text_config() is config and config.rope_scaling == expected.rope_scaling
        again = CONFIG_MAPPING[kind].from_dict(config.to_dict())
        assert described(again).items() >= described(expected).items(), changes


@pytest.mark.parametrize("kind", FIELDS)
def test_what_is_unusual_is_left_to_transformers(kind: str) -> None:
    for changes in UNUSUAL:
        assert read_fields({"model_type": kind, **changes}, FIELDS) is None, changes


@pytest.mark.parametrize("kind", [None, 3, ["llama"], "gemma", "of tomorrow"])
def test_other_types_are_left_to_transformers(kind: Any) -> None:
    assert read_fields({"model_type": kind}, FIELDS) is None


@pytest.mark.parametrize(("kind", "architecture"), ARCHITECTURES.items())
def test_the_plugin_of_the_architecture_reads_it(kind: str, architecture: str) -> None:
    source = {"model_type": kind, "architectures": ["Unknown", architecture], "rope_theta": 7.0}
    raw, config = read_config(ModelFiles(Path("/nowhere"), (), source), without_fallback())
    assert isinstance(config, PlainConfig) and raw == source
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 7.0}


def test_a_published_configuration_of_experts_is_read() -> None:
    """Qwen3-30B-A3B's."""
    source = {
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
        "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
        "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True,
        "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
        "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
        "vocab_size": 151936,
    }  # fmt: skip
    _, config = read_config(ModelFiles(Path("/nowhere"), (), source), without_fallback())
    assert isinstance(config, PlainConfig)
    expected = CONFIG_MAPPING["qwen3_moe"].from_dict(deepcopy(source))
    names = source.keys() - {"architectures", "torch_dtype", "rope_theta", "rope_scaling"}
    assert {n: getattr(config, n) for n in names} == {n: getattr(expected, n) for n in names}
    assert config.rope_parameters == expected.rope_parameters


def test_reading_one_changes_nothing_and_shares_nothing() -> None:
    source = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "rope_parameters": {"rope_theta": 7.0},
    }
    raw, config = read_config(ModelFiles(Path("/nowhere"), (), source), PluginManager())
    assert isinstance(config, PlainConfig) and raw == source
    config.rope_parameters["rope_theta"] = 8.0
    assert raw["rope_parameters"] == source["rope_parameters"] == {"rope_theta": 7.0}


@pytest.mark.parametrize("architectures", [["LlamaForCausalLM"], None, "LlamaForCausalLM", [3]])
def test_refusals_are_those_of_transformers(architectures: Any) -> None:
    config = {"model_type": "llama", "rope_scaling": [1], "architectures": architectures}
    with pytest.raises(CheckpointError, match="transformers rejects"):
        read_config(ModelFiles(Path("/nowhere"), (), config), PluginManager())


def test_an_engine_starts_without_transformers() -> None:
    code = """if True:
        import sys
        from treadle import LLM, SamplingParams
        with LLM("demo:treadle-demo", num_pages=8) as llm:
            llm.generate("Hello", SamplingParams(max_tokens=1))
        assert "transformers" not in sys.modules
        print("without")
    """
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "without\n"
