"""Objects of plugins behind the boundary: their arguments, and what ``isinstance`` sees of them."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from treadle.api.contracts import attributes, is_protocol, members
from treadle.api.kinds import CORE_KINDS, TOKENIZERS
from treadle.api.plugin_kind import PluginKind
from treadle.config import PluginConfig
from treadle.errors import TreadleError
from treadle.plugins import PluginManager
from treadle.plugins.boundary import wrap
from treadle.plugins.call_stats import PluginCallStats
from treadle.plugins.entries import Entry
from treadle.plugins.guard import PluginGuard

PLUGIN = """
from treadle.api import impl

TREADLE = {"tokenizers": ["one"]}

class OneByte:
    def token_bytes(self, id):
        return bytes([id])

    def __getattr__(self, name):
        return lambda *arguments: None

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


@pytest.mark.parametrize("kind", [k for k in CORE_KINDS if k.builds and is_protocol(k.builds)])
def test_what_is_not_the_protocol_is_refused_when_it_is_built(kind: PluginKind[Any]) -> None:
    """Not in the first request, or the first step, that needs the missing method."""
    guard = PluginGuard(Entry(kind.name, "x", "x", "x", "1"), kind, PluginCallStats())
    for wrong in (object(), None, 5):
        with pytest.raises(
            TreadleError, match=f"{kind.name}:x from .* {kind.builds.__name__}, with"
        ):
            wrap(wrong, guard)


@pytest.mark.parametrize(
    ("kind", "protocol"),
    [
        pytest.param(kind, protocol, id=f"{kind.name}-{protocol.__name__}")
        for kind in CORE_KINDS
        for protocol in kind.optional
    ],
)
def test_an_optional_protocol_is_seen_without_getattr(
    kind: PluginKind[Any], protocol: type
) -> None:
    """``isinstance`` looks members up statically from Python 3.12 on, data included."""
    names = {*attributes(protocol), *(member.name for member in members(protocol))}
    plugin = type("Built", (), {name: lambda self: None for name in names})()
    guard = PluginGuard(Entry(kind.name, "x", "x", "x", "1"), kind, PluginCallStats())
    guarded = wrap(plugin, guard, contract=protocol.__name__)
    assert [name for name in names if inspect.getattr_static(guarded, name, None) is None] == []
