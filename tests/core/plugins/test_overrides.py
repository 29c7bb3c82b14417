"""Every key that an engine cannot do without can be replaced: an override of it takes effect."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from treadle.config import from_options
from treadle.engine.core import EngineCore
from treadle.errors import CheckpointError
from treadle.known_plugins import ALWAYS_ALLOWED, DISTRIBUTION_OF_KEY
from treadle.plugins import PluginManager, installed_kinds
from treadle.testing.checkpoints import make_checkpoint, make_tokenizer
from treadle.text.assets import open_checkpoint, plugin_config

OTHERS = {"treadle-server", "treadle-cli"}
BUILT_IN = sorted(id for id, dist in DISTRIBUTION_OF_KEY.items() if dist in ALWAYS_ALLOWED - OTHERS)

USE: dict[str, dict[str, Any]] = {
    "load_formats:dummy": {"load_format": "dummy"},
    "load_formats:pt": {"load_format": "pt"},
    "model_sources:hf": {"model": "hf:nobody/nothing"},
    "scheduling_policies:priority": {"scheduling_policy": "priority"},
}
"""Options with which an engine uses a key; the others are used without any."""

PLUGIN = """
from treadle.api import impl
from treadle.errors import CheckpointError

TREADLE = {{{kind!r}: [{key!r}]}}


@impl
def {hook}():
    raise CheckpointError("the override of {kind}:{key} was called")
"""


@pytest.mark.parametrize("id", BUILT_IN)
def test_an_override_of_a_built_in_key_takes_effect(id: str, tmp_path: Path) -> None:
    kind, _, key = id.partition(":")
    file = tmp_path / "override.py"
    file.write_text(PLUGIN.format(kind=kind, key=key, hook=installed_kinds()[kind].hook))
    model = {"model": str(make_checkpoint(tmp_path / "model")), "renderer": "jinja"}
    make_tokenizer(tmp_path / "model")
    options = {
        **model,
        "kv_cache_memory_bytes": 10_000_000,
        "cpu_threads": 1,
        "device": "cpu",
        **USE.get(id, {}),
    }
    config = from_options(plugin_file=[str(file)], **options)
    plugins = PluginManager(plugin_config(config))
    assert plugins.choose(kind, key).override
    with pytest.raises(CheckpointError, match=re.escape(f"the override of {id} was called")):
        open_checkpoint(config, plugins)
        EngineCore(config, plugins).close()


def test_there_are_keys_that_every_engine_needs() -> None:
    assert {"attention_backends:sdpa", "executors:uni", "load_formats:dummy"} < set(BUILT_IN)
