"""What the engine and the layers of models share: attention, kernel operations, weights that load.

The layers that model files are made of are in the distribution ``treadle-layers-kit``.
"""

from treadle.layers.attention import Attention
from treadle.layers.collective import (
    SingleRankCommunicator,
    dry_run,
    shard_features,
    shard_heads,
)
from treadle.layers.device import device_info, dtype_name
from treadle.layers.weight import (
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
    "Layout",
    "Quantizable",
    "Shard",
    "Sharded",
    "SingleRankCommunicator",
    "SupportsPostLoad",
    "SupportsWeightLookup",
    "WeightMismatchError",
    "WeightTarget",
    "device_info",
    "dry_run",
    "dtype_name",
    "empty_weight",
    "layout_of",
    "set_shards",
    "shard_features",
    "shard_heads",
)
