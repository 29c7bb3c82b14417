"""Files of ``torch.save``: the old format too, damaged ones, and objects that are not loaded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from treadle.errors import CheckpointError
from treadle.plugins import PluginManager
from treadle.testing.checkpoints import make_checkpoint
from treadle.testing.models import TinyModel

ONE = "model.safetensors"


@pytest.fixture(scope="module")
def plugins() -> PluginManager:
    return PluginManager()


IDS = torch.arange(3, 20)


def refuse(folder: Path, plugins: PluginManager, *patterns: str) -> str:
    with pytest.raises(CheckpointError) as exc_info:
        TinyModel(folder, plugins, load_format="pt")
    for pattern in patterns:
        assert re.search(pattern, str(exc_info.value)), f"{pattern!r} not in: {exc_info.value}"
    return str(exc_info.value)


def test_the_old_torch_format_is_read(tmp_path: Path, plugins: PluginManager) -> None:
    folder = make_checkpoint(tmp_path)
    expected = TinyModel(folder, plugins).logits(IDS)
    tensors = load_file(folder / ONE)
    (folder / ONE).unlink()
    torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert torch.equal(TinyModel(folder, plugins, load_format="pt").logits(IDS), expected)


def test_a_damaged_torch_file(tmp_path: Path, plugins: PluginManager) -> None:
    folder = make_checkpoint(tmp_path)
    torch.save(load_file(folder / ONE), folder / "pytorch_model.bin")
    (folder / ONE).unlink()
    data = (folder / "pytorch_model.bin").read_bytes()
    for size in (len(data) // 2, 40, 0):
        (folder / "pytorch_model.bin").write_bytes(data[:size])
        refuse(folder, plugins, r"pytorch_model\.bin .* cannot be read as PyTorch weights")


class Payload:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("pwned"),)


def test_objects_in_a_torch_file_are_not_loaded(
    tmp_path: Path, plugins: PluginManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(tmp_path)
    (folder / ONE).unlink()
    monkeypatch.chdir(tmp_path)
    torch.save({"model.norm.weight": Payload()}, folder / "pytorch_model.bin")
    refuse(folder, plugins, "contains Python objects, which treadle does not load")
    assert not (tmp_path / "pwned").exists()
