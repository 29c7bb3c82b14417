"""Finding a checkpoint: where its files are, what it claims, and which plugins are made for it.

Reading its tensors belongs to executors. Nothing here imports torch or transformers.
"""

from treadle.loading.config import config_json
from treadle.loading.formats import fetch
from treadle.loading.sources import parse_ref

__all__ = ("config_json", "fetch", "parse_ref")
