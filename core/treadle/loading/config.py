"""``config.json`` with the user's overrides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treadle.api.files import ModelFiles
from treadle.loading.sizes import check_config

__all__ = ("config_json", "merge")


def config_json(files: ModelFiles, hf_overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return ``config.json`` with overrides. Raises ``CheckpointError`` if a size is out of bounds."""
    config = merge(files.config, hf_overrides or {})
    check_config(config, files.root)
    return config


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a deep copy of ``base`` with ``changes``. Mappings are merged, others replaced."""
    merged = {k: merge(v, {}) if isinstance(v, Mapping) else v for k, v in base.items()}
    for key, value in changes.items():
        current = merged.get(key)
        if isinstance(value, Mapping):
            merged[key] = merge(current if isinstance(current, Mapping) else {}, value)
        else:
            merged[key] = value
    return merged
