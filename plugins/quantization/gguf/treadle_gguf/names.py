"""The names and shapes of a GGUF file's tensors, and those that the same model has on the hub."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType

from treadle_gguf.reader import TensorInfo

__all__ = ("ARCHITECTURES", "Place", "is_matrix", "places")

ARCHITECTURES = MappingProxyType(
    {
        "llama": ("LlamaForCausalLM", "llama"),
        "qwen2": ("Qwen2ForCausalLM", "qwen2"),
        "qwen3": ("Qwen3ForCausalLM", "qwen3"),
        "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    }
)
"""``general.architecture``, and the architecture and model type on the hub."""
WHOLE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
STACKED = {
    "ffn_gate_exps": "gate_proj",
    "ffn_up_exps": "up_proj",
    "ffn_down_exps": "down_proj",
}
LAYER = re.compile(r"blk\.(\d{1,4})\.(\w+)\.(weight|bias)")
# Their rows are in the order of rotations by pairs of neighbours.
TURNED = ("attn_q", "attn_k")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor, or one of a stack of them, belongs; ``heads``: their rows must be put in order."""

    name: str
    item: int | None = None
    heads: str | None = None


def is_matrix(name: str, info: TensorInfo) -> bool:
    """Return whether a tensor is the weight of a linear layer, which may stay in its blocks."""
    return len(info.shape) > 1 and not name.startswith("token_embd") and "gate_inp" not in name


def places(architecture: str, name: str, num_experts: int) -> Iterator[Place]:
    """Yield the places of a tensor; none for one that the model does not need."""
    stem, _, leaf = name.rpartition(".")
    if stem in WHOLE:
        yield Place(f"{WHOLE[stem]}.{leaf}")
    elif match := LAYER.fullmatch(name):
        layer, stem, leaf = match.groups()
        home = f"model.layers.{layer}"
        if stem in STACKED:
            for item in range(num_experts):
                yield Place(f"{home}.mlp.experts.{item}.{STACKED[stem]}.{leaf}", item)
        else:
            is_turned = architecture == "llama" and stem in TURNED
            heads = "num_attention_heads" if stem == "attn_q" else "num_key_value_heads"
            # A name that is not known stays as it is, and is then reported.
            yield Place(
                f"{home}.{IN_LAYER.get(stem, stem)}.{leaf}", heads=heads if is_turned else None
            )
    elif name != "rope_freqs.weight":
        yield Place(name)
