"""The fields of the configurations of GPT-OSS."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treadle_layers_kit.model_config import DECODER

__all__ = ("FIELDS",)

FIELDS: Mapping[str, Mapping[str, Any]] = {
    "gpt_oss": DECODER
    | {
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
            "rope_theta": 150000.0,
        },
        "attention_bias": True,
        "sliding_window": 128,
        "layer_types": None,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "router_aux_loss_coef": 0.001,
        "output_router_logits": False,
        "bos_token_id": None,
        "eos_token_id": None,
        # Of published checkpoints, which transformers keeps and nothing reads.
        "experts_per_token": None,
        "initial_context_length": None,
    },
}
"""Of each model type, with the defaults of transformers."""
