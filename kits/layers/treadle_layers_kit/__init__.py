"""What model files and quantization plugins are made of: layers that know tensor parallelism,
quantization, and where kernels may take their place; and parameters that know how checkpoints fill
them."""

from treadle_layers_kit.attention import Attention
from treadle_layers_kit.collective import (
    SingleRankCommunicator,
    dry_run,
    shard_features,
    shard_heads,
)
from treadle_layers_kit.decoder import CausalDecoder, Decoder, DecoderLayer, head_size
from treadle_layers_kit.embedding import Embedding, LMHead
from treadle_layers_kit.experts import Experts, MoE
from treadle_layers_kit.linear import Linear, QKVLinear
from treadle_layers_kit.mlp import ClampedSwiGLU, GatedMLP, gated_activation
from treadle_layers_kit.norm import LayerNorm, RMSNorm
from treadle_layers_kit.plain import PlainLinear
from treadle_layers_kit.rope import rope_parameters
from treadle_layers_kit.rotary import CosSin, RotaryEmbedding
from treadle_layers_kit.self_attention import SelfAttention, cache_scale
from treadle_layers_kit.weight import (
    Layout,
    Quantizable,
    Shard,
    Sharded,
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
    "ClampedSwiGLU",
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
    "Quantizable",
    "RMSNorm",
    "RotaryEmbedding",
    "SelfAttention",
    "Shard",
    "Sharded",
    "SingleRankCommunicator",
    "SupportsPostLoad",
    "SupportsWeightLookup",
    "WeightMismatchError",
    "WeightTarget",
    "cache_scale",
    "dry_run",
    "empty_weight",
    "gated_activation",
    "head_size",
    "layout_of",
    "rope_parameters",
    "set_shards",
    "shard_features",
    "shard_heads",
)
