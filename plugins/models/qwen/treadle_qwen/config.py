"""The fields of the configurations of the dense models of Qwen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treadle_layers_kit.model_config import DECODER

__all__ = ("FIELDS",)

QWEN: dict[str, Any] = DECODER | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
    "bos_token_id": None,
    "eos_token_id": None,
}

FIELDS: Mapping[str, Mapping[str, Any]] = {
    "qwen2": QWEN,
    "qwen3": QWEN | {"head_dim": 128, "attention_bias": False},
}
"""Of each model type, with the defaults of transformers."""
