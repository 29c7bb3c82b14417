"""A checkpoint's configuration with the user's overrides."""

from __future__ import annotations

from pathlib import Path

import pytest

from treadle.api.files import ModelFiles
from treadle.errors import CheckpointError
from treadle.loading.config import config_json, merge


def test_merge_replaces_what_is_no_mapping() -> None:
    assert merge(
        {"a": {"b": 1, "c": 2}, "d": [1]}, {"a": {"b": {"x": 1}}, "d": [2], "e": None}
    ) == {
        "a": {"b": {"x": 1}, "c": 2},
        "d": [2],
        "e": None,
    }


def test_overrides_are_checked_and_the_file_is_not_changed() -> None:
    files = ModelFiles(Path("/nowhere"), ("config.json",), {"a": {"b": 1}, "num_layers": 2})
    config = config_json(files, {"a": {"c": 2}})
    assert config == {"a": {"b": 1, "c": 2}, "num_layers": 2}
    config["a"]["b"] = 3
    assert files.config == {"a": {"b": 1}, "num_layers": 2}
    with pytest.raises(CheckpointError, match=r"^num_layers of /nowhere is 5000"):
        config_json(files, {"num_layers": 5000})
