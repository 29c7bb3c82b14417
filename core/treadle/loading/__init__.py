"""Finding checkpoints, reading their configuration, and loading their weights.

What needs torch is in the modules ``build`` and ``weights``; importing this package does not.
"""

from treadle.loading.config import read_config
from treadle.loading.formats import fetch
from treadle.loading.sources import parse_ref

__all__ = ("fetch", "parse_ref", "read_config")
