"""A GGUF file with random weights in bfloat16 in the shape of a model, for llama.cpp to be measured with.

::

    pip install gguf
    python benchmarks/gguf_shape.py benchmarks/shapes/qwen3-0.6b qwen3-0.6b.gguf

It has no tokenizer, which ``llama-bench`` does not need. ``llama-quantize --pure FILE OUT Q4_0`` makes other types of it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter

BF16_FILE = 32
"""The number of a file in bfloat16."""


class ShapeWriter:
    """Writes tensors of one value or of random ones."""

    def __init__(self, file: str, config: dict[str, Any]) -> None:
        self._writer = writer = GGUFWriter(file, config["model_type"])
        heads = config["num_attention_heads"]
        self.head_size = config.get("head_dim") or config["hidden_size"] // heads
        writer.add_file_type(BF16_FILE)
        writer.add_tokenizer_model("no_vocab")
        writer.add_vocab_size(config["vocab_size"])
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_block_count(config["num_hidden_layers"])
        writer.add_head_count(heads)
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(self.head_size)
        writer.add_value_length(self.head_size)
        writer.add_rope_dimension_count(self.head_size)
        writer.add_rope_freq_base(float(config.get("rope_theta") or 10000.0))
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])

    def matrix(self, name: str, out: int, inputs: int) -> None:
        words = (torch.randn(out, inputs) * 0.02).bfloat16().view(torch.uint8).numpy()
        self._writer.add_tensor(f"{name}.weight", words, raw_dtype=GGMLQuantizationType.BF16)

    def ones(self, name: str, size: int) -> None:
        self._writer.add_tensor(f"{name}.weight", np.ones(size, dtype=np.float32))

    def close(self) -> None:
        self._writer.write_header_to_file()
        self._writer.write_kv_data_to_file()
        self._writer.write_tensors_to_file()
        self._writer.close()


def main() -> None:
    folder, file = sys.argv[1:]
    config = json.loads((Path(folder) / "config.json").read_text())
    torch.manual_seed(0)
    shape = ShapeWriter(file, config)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * shape.head_size
    keys = config["num_key_value_heads"] * shape.head_size
    shape.matrix("token_embd", config["vocab_size"], hidden)
    shape.ones("output_norm", hidden)
    if not config.get("tie_word_embeddings"):
        shape.matrix("output", config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"blk.{index}"
        for name in ("attn_norm", "ffn_norm"):
            shape.ones(f"{layer}.{name}", hidden)
        if config["model_type"] == "qwen3":
            for name in ("attn_q_norm", "attn_k_norm"):
                shape.ones(f"{layer}.{name}", shape.head_size)
        shape.matrix(f"{layer}.attn_q", queries, hidden)
        shape.matrix(f"{layer}.attn_k", keys, hidden)
        shape.matrix(f"{layer}.attn_v", keys, hidden)
        shape.matrix(f"{layer}.attn_output", hidden, queries)
        shape.matrix(f"{layer}.ffn_gate", inner, hidden)
        shape.matrix(f"{layer}.ffn_up", inner, hidden)
        shape.matrix(f"{layer}.ffn_down", hidden, inner)
    shape.close()


if __name__ == "__main__":
    main()
