"""What model files are made of. Layers know tensor parallelism and quantization; models do not."""

from weft.layers.attention import Attention
from weft.layers.collective import NullCollective, divide, divide_heads
from weft.layers.decoder import CausalDecoder, Decoder, DecoderLayer, head_size
from weft.layers.device import device_info, dtype_name
from weft.layers.embedding import Embedding, LMHead
from weft.layers.experts import Experts, MoE
from weft.layers.linear import Linear, QKVLinear
from weft.layers.mlp import GatedMLP, gated_activation
from weft.layers.norm import LayerNorm, RMSNorm
from weft.layers.plain import PlainLinear
from weft.layers.rope import rope_parameters
from weft.layers.rotary import Angles, RotaryEmbedding
from weft.layers.self_attention import SelfAttention, cache_scale
from weft.layers.weight import (
    Finishing,
    Layout,
    Locating,
    Mismatch,
    Part,
    Slot,
    bind,
    layout_of,
    weight,
)

__all__ = (
    "Angles",
    "Attention",
    "CausalDecoder",
    "Decoder",
    "DecoderLayer",
    "Embedding",
    "Experts",
    "Finishing",
    "GatedMLP",
    "LMHead",
    "LayerNorm",
    "Layout",
    "Linear",
    "Locating",
    "Mismatch",
    "MoE",
    "NullCollective",
    "Part",
    "PlainLinear",
    "QKVLinear",
    "RMSNorm",
    "RotaryEmbedding",
    "SelfAttention",
    "Slot",
    "bind",
    "cache_scale",
    "device_info",
    "divide",
    "divide_heads",
    "dtype_name",
    "gated_activation",
    "head_size",
    "layout_of",
    "rope_parameters",
    "weight",
)
