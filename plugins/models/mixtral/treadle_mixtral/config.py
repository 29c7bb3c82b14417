"""The fields of the configurations of Mixtral."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treadle_layers_kit.model_config import DECODER

__all__ = ("FIELDS",)

FIELDS: Mapping[str, Mapping[str, Any]] = {
    "mixtral": DECODER
    | {
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096 * 32,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "sliding_window": None,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
    },
}
"""Of each model type, with the defaults of transformers."""
