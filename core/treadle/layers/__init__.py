"""What model files are made of. Layers know tensor parallelism and quantization; models do not."""

from treadle.layers.attention import Attention
from treadle.layers.collective import SingleRankCommunicator, shard_features, shard_heads
from treadle.layers.decoder import CausalDecoder, Decoder, DecoderLayer, head_size
from treadle.layers.device import device_info, dtype_name
from treadle.layers.embedding import Embedding, LMHead
from treadle.layers.experts import Experts, MoE
from treadle.layers.linear import Linear, QKVLinear
from treadle.layers.mlp import GatedMLP, gated_activation
from treadle.layers.norm import LayerNorm, RMSNorm
from treadle.layers.plain import PlainLinear
from treadle.layers.rope import rope_parameters
from treadle.layers.rotary import CosSin, RotaryEmbedding
from treadle.layers.self_attention import SelfAttention, cache_scale
from treadle.layers.weight import (
    Layout,
    Shard,
    SupportsPostLoad,
    SupportsWeightLookup,
    WeightMismatchError,
    WeightTarget,
    empty_weight,
    layout_of,
    set_shards,
)

__all__ = (
    "Attention",
    "CausalDecoder",
    "CosSin",
    "Decoder",
    "DecoderLayer",
    "Embedding",
    "Experts",
    "GatedMLP",
    "LMHead",
    "LayerNorm",
    "Layout",
    "Linear",
    "MoE",
    "PlainLinear",
    "QKVLinear",
    "RMSNorm",
    "RotaryEmbedding",
    "SelfAttention",
    "Shard",
    "SingleRankCommunicator",
    "SupportsPostLoad",
    "SupportsWeightLookup",
    "WeightMismatchError",
    "WeightTarget",
    "cache_scale",
    "device_info",
    "dtype_name",
    "empty_weight",
    "gated_activation",
    "head_size",
    "layout_of",
    "rope_parameters",
    "set_shards",
    "shard_features",
    "shard_heads",
)
