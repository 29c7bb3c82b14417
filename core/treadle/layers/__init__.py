"""What model files are made of. Layers know tensor parallelism and quantization; models do not."""

from treadle.layers.attention import Attention
from treadle.layers.collective import SingleRankCommunicator, divide, divide_heads
from treadle.layers.decoder import CausalDecoder, Decoder, DecoderLayer, head_size
from treadle.layers.device import device_info, dtype_name
from treadle.layers.embedding import Embedding, LMHead
from treadle.layers.experts import Experts, MoE
from treadle.layers.linear import Linear, QKVLinear
from treadle.layers.mlp import GatedMLP, gated_activation
from treadle.layers.norm import LayerNorm, RMSNorm
from treadle.layers.plain import PlainLinear
from treadle.layers.rope import rope_parameters
from treadle.layers.rotary import Angles, RotaryEmbedding
from treadle.layers.self_attention import SelfAttention, cache_scale
from treadle.layers.weight import (
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
    "Part",
    "PlainLinear",
    "QKVLinear",
    "RMSNorm",
    "RotaryEmbedding",
    "SelfAttention",
    "SingleRankCommunicator",
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
