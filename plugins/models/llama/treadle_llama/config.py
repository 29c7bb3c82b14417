"""The fields of the configurations of Llama and Mistral."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treadle_layers_kit.model_config import DECODER

__all__ = ("FIELDS",)

FIELDS: Mapping[str, Mapping[str, Any]] = {
    "llama": DECODER
    | {"pretraining_tp": 1, "attention_bias": False, "mlp_bias": False, "head_dim": None},
    "mistral": DECODER
    | {
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "head_dim": None,
        "max_position_embeddings": 4096 * 32,
        "sliding_window": 4096,
    },
}
"""Of each model type, with the defaults of transformers."""
