"""Objects of plugins behind the boundary take every way of passing arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from treadle.api.kinds import TOKENIZERS
from treadle.config import PluginConfig
from treadle.plugins import PluginManager

PLUGIN = """
from treadle.api import impl

TREADLE = {"tokenizers": ["one"]}

class OneByte:
    def token_bytes(self, id):
        return bytes([id])

@impl
def treadle_tokenizer(mode):
    return OneByte() if mode == "one" else None
"""


def test_the_fast_path_takes_keyword_arguments(tmp_path: Path) -> None:
    """``token_bytes`` is not counted; an ``all_gather(x, dim=0)`` takes the same path."""
    (tmp_path / "one.py").write_text(PLUGIN)
    plugins = PluginManager(PluginConfig(plugin_file=[str(tmp_path / "one.py")]))
    tokenizer: Any = plugins.create_guarded(TOKENIZERS, "one", files=None)
    assert tokenizer.token_bytes(65) == b"A"
    assert tokenizer.token_bytes(id=66) == b"B"
