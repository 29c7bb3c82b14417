"""Sizes that published configurations have must pass; a number too many must not."""

from __future__ import annotations

from typing import Any

import pytest

from treadle.errors import CheckpointError
from treadle.loading.config import check_config


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"num_hidden_layers": 126, "vocab_size": 262_144, "hidden_size": 16_384},
        {"max_position_embeddings": 10_485_760, "sliding_window": None, "head_dim": None},
        {"num_key_value_heads": [4, None, 8], "intermediate_size": [16_384, 8192]},
        {"n_routed_experts": 384, "num_experts_per_tok": 8, "moe_intermediate_size": 2048},
        {"pad_token_id": -1, "num_experts": 0, "use_cache": True, "num_labels": 2},
        {"quantization_config": {"group_size": -1, "num_bits": 4, "block_size": "x"}},
        {"vision_config": {"patch_size": [2, 14, 14], "image_size": "448", "window_size": 2.5}},
        {"id2label": {"0": "a"}, "task": [{"num_beams": 4}], "layer_types": ["full"] * 9},
    ],
)
def test_what_is_published_passes(config: dict[str, Any]) -> None:
    check_config(config, "m")


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"vision_config": {"num_layers": 4097}}, "num_layers"),
        ({"tasks": [{"num_beams": 10**9}]}, "num_beams"),
        ({"window_size": [1, 2**40]}, "window_size"),
        ({"anything": -(2**63)}, "anything"),
        ({"n_embd": 0}, "n_embd"),
        ({"num_experts": "8"}, "num_experts"),
    ],
)
def test_what_is_out_of_bounds_is_named(config: dict[str, Any], name: str) -> None:
    with pytest.raises(CheckpointError, match=f"^{name} of m is "):
        check_config(config, "m")
