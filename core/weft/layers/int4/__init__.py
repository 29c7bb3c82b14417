"""Four-bit weights on CUDA devices, for every quantization plugin that has them."""

from weft.layers.int4.packing import CHUNK, pack_codes, pack_steps
from weft.layers.int4.product import TiledInt4, TilingInt4, find_tiling
from weft.layers.int4.tiles import Tile, choose

__all__ = (
    "CHUNK",
    "Tile",
    "TiledInt4",
    "TilingInt4",
    "choose",
    "find_tiling",
    "pack_codes",
    "pack_steps",
)
