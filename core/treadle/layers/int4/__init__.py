"""Four-bit weights on CUDA devices, for every quantization plugin that has them."""

from treadle.layers.int4.packing import CHUNK, RUN, pack_codes, pack_steps, unpack
from treadle.layers.int4.product import PackedInt4, int4_linear

__all__ = (
    "CHUNK",
    "RUN",
    "PackedInt4",
    "int4_linear",
    "pack_codes",
    "pack_steps",
    "unpack",
)
