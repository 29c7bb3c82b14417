"""Safetensors: shards and their index, and files that are not what they should be."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from treadle.errors import CheckpointError
from treadle.plugins import PluginManager
from treadle.testing.checkpoints import make_checkpoint
from treadle.testing.models import TinyModel

ONE = "model.safetensors"


@pytest.fixture(scope="module")
def plugins() -> PluginManager:
    return PluginManager()


def sharded(folder: Path, **options: Any) -> tuple[Path, dict[str, str]]:
    make_checkpoint(folder, shard_size="100KB", **options)
    index = json.loads((folder / f"{ONE}.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 2
    return folder, index


def refuse(folder: Path, plugins: PluginManager, *patterns: str) -> str:
    with pytest.raises(CheckpointError) as exc_info:
        TinyModel(folder, plugins)
    for pattern in patterns:
        assert re.search(pattern, str(exc_info.value)), f"{pattern!r} not in: {exc_info.value}"
    return str(exc_info.value)


def test_a_second_copy_in_another_layout_is_left_alone(
    tmp_path: Path, plugins: PluginManager
) -> None:
    folder = make_checkpoint(tmp_path)
    save_file({"layers.0.w": torch.ones(2)}, folder / "consolidated.safetensors")
    TinyModel(folder, plugins)
    (folder / ONE).rename(folder / "model-00001-of-00001.safetensors")  # without an index
    TinyModel(folder, plugins)


def test_a_truncated_file(tmp_path: Path, plugins: PluginManager) -> None:
    folder = make_checkpoint(tmp_path)
    data = (folder / ONE).read_bytes()
    for size in (len(data) - 1, len(data) // 2, 100, 5, 0):
        (folder / ONE).write_bytes(data[:size])
        refuse(
            folder, plugins, rf"{ONE} \({size} bytes\) cannot be read as safetensors", "truncated"
        )


def test_a_lfs_pointer(tmp_path: Path, plugins: PluginManager) -> None:
    folder = make_checkpoint(tmp_path)
    (folder / ONE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    refuse(folder, plugins, "LFS pointer")


def test_a_missing_shard(tmp_path: Path, plugins: PluginManager) -> None:
    folder, index = sharded(tmp_path)
    shard = index["model.norm.weight"]
    (folder / shard).unlink()
    refuse(folder, plugins, rf"the shard {shard}, listed in {ONE}\.index\.json, is missing")


def test_a_tensor_that_only_the_index_knows(tmp_path: Path, plugins: PluginManager) -> None:
    folder, index = sharded(tmp_path)
    shard = folder / index["model.norm.weight"]
    tensors = load_file(shard)
    tensors.pop("model.norm.weight")
    save_file(tensors, shard)
    refuse(folder, plugins, r"model\.norm\.weight is listed in the index .* not in the shard")


@pytest.mark.parametrize(
    "text", ["{", "{}", '{"weight_map": 3}', '{"weight_map": {"a": "../../secret"}}']
)
def test_a_broken_index(tmp_path: Path, plugins: PluginManager, text: str) -> None:
    folder = make_checkpoint(tmp_path)
    (folder / f"{ONE}.index.json").write_text(text)
    refuse(folder, plugins, r"the weight index .*index\.json cannot be read")


def test_one_tensor_in_two_files(tmp_path: Path, plugins: PluginManager) -> None:
    folder = make_checkpoint(tmp_path)
    tensors = load_file(folder / ONE)
    (folder / ONE).unlink()
    save_file(tensors, folder / "a.safetensors")
    save_file({"model.norm.weight": tensors["model.norm.weight"]}, folder / "b.safetensors")
    refuse(folder, plugins, r"model\.norm\.weight is both in a\.safetensors and in b\.safetensors")
