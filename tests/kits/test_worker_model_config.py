"""Reading what a checkpoint says about itself."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GemmaConfig, LlamaConfig, PreTrainedConfig

from treadle.api.cache import DeviceInfo
from treadle.api.files import ModelFiles
from treadle.errors import CheckpointError, ConfigError
from treadle.plugins import PluginManager
from treadle_worker_kit.model_config import (
    eos_ids,
    max_model_len,
    quantization_config,
    read_config,
    resolve_dtype,
)

CPU = DeviceInfo("cpu")
HOPPER = DeviceInfo("cuda", (9, 0), name="H100")
TURING = DeviceInfo("cuda", (7, 5), name="T4")


def files(config: dict[str, Any], root: Path = Path("/nowhere")) -> ModelFiles:
    return ModelFiles(root, ("config.json",), config)


def test_known_families_get_their_own_class() -> None:
    raw, config = read_config(
        files({"model_type": "gemma", "hidden_size": 64, "rope_theta": 5.0}), PluginManager()
    )
    assert isinstance(config, GemmaConfig)
    assert raw["hidden_size"] == config.hidden_size == 64
    assert config.rope_parameters["rope_theta"] == 5.0


def test_unknown_families_get_a_generic_one() -> None:
    source = {
        "model_type": "of tomorrow",
        "architectures": ["New"],
        "width": 3,
        "auto_map": {"a": "x.Y"},
    }
    raw, config = read_config(files(source), PluginManager())
    assert type(config) is PreTrainedConfig
    assert (config.width, config.architectures) == (3, ["New"])
    assert raw == source


def test_overrides_are_merged_deeply_and_change_nothing_else() -> None:
    source = {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}
    before = json.dumps(source)
    raw, config = read_config(
        files(source),
        PluginManager(),
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}, "new": 1},
    )
    assert config.rope_parameters["rope_theta"] == 7.0
    assert config.rope_parameters["factor"] == 2.0
    assert raw["new"] == 1
    assert json.dumps(source) == before


def test_a_missing_configuration_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"nowhere has no config\.json"):
        read_config(files({}), PluginManager())


def test_values_that_transformers_refuses_are_named() -> None:
    with pytest.raises(CheckpointError, match=r"rejects .*'llama'.*rms_norm_eps"):
        read_config(files({"model_type": "llama", "rms_norm_eps": "small"}), PluginManager())


@pytest.mark.parametrize(
    ("option", "stated", "device", "expected"),
    [
        ("auto", "bfloat16", CPU, torch.bfloat16),
        ("auto", "float32", CPU, torch.float32),
        ("auto", "float16", CPU, torch.bfloat16),
        ("auto", "float16", HOPPER, torch.float16),
        ("auto", "bfloat16", TURING, torch.float16),
        ("auto", None, CPU, torch.float32),
        ("auto", None, HOPPER, torch.bfloat16),
        ("auto", None, TURING, torch.float16),
        ("float32", "bfloat16", HOPPER, torch.float32),
        ("float16", "bfloat16", CPU, torch.float16),
    ],
)
def test_dtype(option: str, stated: str | None, device: DeviceInfo, expected: torch.dtype) -> None:
    config = LlamaConfig(dtype=stated)
    assert resolve_dtype(option, config, device) is expected


def test_dtype_refusals() -> None:
    with pytest.raises(ConfigError, match="'int3'; allowed: auto, float32"):
        resolve_dtype("int3", LlamaConfig(), CPU)
    with pytest.raises(ConfigError, match="T4 does not support; use float16"):
        resolve_dtype("bfloat16", LlamaConfig(), TURING)


def llama(**values: Any) -> LlamaConfig:
    rope = {"rope_theta": 1e4, **values}
    return LlamaConfig(max_position_embeddings=100, rope_parameters=rope)


@pytest.mark.parametrize(
    ("config", "usual", "limit"),
    [
        (llama(rope_type="default"), 100, 100),
        (llama(rope_type="linear", factor=4.0), 400, 400),
        (llama(rope_type="dynamic", factor=4.0), 100, 400),
        (llama(rope_type="yarn", factor=4.0, original_max_position_embeddings=50), 200, 200),
        (llama(rope_type="yarn", factor=4.0, original_max_position_embeddings=10), 100, 100),
        (SimpleNamespace(n_positions=77), 77, 77),
        (SimpleNamespace(get_text_config=lambda: llama(rope_type="default")), 100, 100),
    ],
)
def test_longest_sequence(config: Any, usual: int, limit: int) -> None:
    assert max_model_len(config) == usual
    assert max_model_len(config, limit) == limit
    assert max_model_len(config, 5) == 5
    with pytest.raises(ConfigError, match=f"is {limit + 1}, but the model supports {limit}"):
        max_model_len(config, limit + 1)


def test_a_configuration_without_a_length() -> None:
    assert max_model_len(SimpleNamespace(), 12) == 12
    with pytest.raises(ConfigError, match="has no context length"):
        max_model_len(SimpleNamespace())


def write(folder: Path, value: Any) -> ModelFiles:
    (folder / "generation_config.json").write_text(
        value if isinstance(value, str) else json.dumps(value)
    )
    return files({}, folder)


def test_every_end_of_text_counts(tmp_path: Path) -> None:
    config = LlamaConfig(eos_token_id=[3, 5])
    assert eos_ids(config, files({}, tmp_path)) == {3, 5}
    assert eos_ids(LlamaConfig(eos_token_id=None), files({}, tmp_path)) == frozenset()
    assert eos_ids(config, write(tmp_path, {"eos_token_id": 9})) == {3, 5, 9}


def test_broken_generation_configurations(tmp_path: Path) -> None:
    for text in ("{", "[]"):
        with pytest.raises(CheckpointError, match=r"generation_config\.json"):
            eos_ids(LlamaConfig(), write(tmp_path, text))


def test_quantization_configurations() -> None:
    assert quantization_config(LlamaConfig()) is None
    stated = {"quant_method": "awq", "bits": 4}
    assert quantization_config(LlamaConfig(quantization_config=stated)) == stated
    assert quantization_config(SimpleNamespace(compression_config=stated)) == stated
