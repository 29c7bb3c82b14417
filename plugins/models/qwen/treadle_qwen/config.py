"""The fields of the configurations of Qwen's models."""

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
    "qwen3_moe": DECODER
    | {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "attention_bias": False,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "bos_token_id": None,
        "eos_token_id": None,
        # Of published checkpoints; transformers keeps them.
        "head_dim": None,
        "max_window_layers": None,
    },
}
"""Of each model type, with the defaults of transformers."""
