"""What model files and quantization plugins are made of: layers that know tensor parallelism,
quantization, and where kernels may take their place."""

from treadle_layers_kit.decoder import CausalDecoder, Decoder, DecoderLayer, head_size
from treadle_layers_kit.embedding import Embedding, LMHead
from treadle_layers_kit.experts import Experts, MoE
from treadle_layers_kit.linear import Linear, QKVLinear
from treadle_layers_kit.mlp import GatedMLP, gated_activation
from treadle_layers_kit.norm import LayerNorm, RMSNorm
from treadle_layers_kit.plain import PlainLinear
from treadle_layers_kit.rope import rope_parameters
from treadle_layers_kit.rotary import CosSin, RotaryEmbedding
from treadle_layers_kit.self_attention import SelfAttention, cache_scale

__all__ = (
    "CausalDecoder",
    "CosSin",
    "Decoder",
    "DecoderLayer",
    "Embedding",
    "Experts",
    "GatedMLP",
    "LMHead",
    "LayerNorm",
    "Linear",
    "MoE",
    "PlainLinear",
    "QKVLinear",
    "RMSNorm",
    "RotaryEmbedding",
    "SelfAttention",
    "cache_scale",
    "gated_activation",
    "head_size",
    "rope_parameters",
)
