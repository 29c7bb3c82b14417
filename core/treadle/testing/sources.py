"""The conformance suites of model sources and of load formats: how a checkpoint gets into memory.

::

    class TestMine(PluginSuite, ModelSourceSuite):
        plugin = "model_sources:mine"

        def ref(self, folder):              # make a checkpoint that the source finds
            (folder / "config.json").write_text('{"model_type": "llama"}')
            return ModelRef("mine", str(folder))
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from treadle.api.files import (
    ModelFiles,
    ModelRef,
    ModelSource,
    SupportsRevisions,
    SupportsTensorFiles,
    WeightLoader,
)
from treadle.api.kinds import LOAD_FORMATS, MODEL_SOURCES
from treadle.errors import CheckpointError
from treadle.testing.plugin import FOREIGN, PluginTest

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ("LoadFormatSuite", "ModelSourceSuite")


class ModelSourceSuite(PluginTest):
    """Checks that a source returns the requested files, all of them on the local disk."""

    def ref(self, folder: Path) -> ModelRef:
        """Return a reference that the source can resolve; it may use the empty ``folder``."""
        raise NotImplementedError

    def missing(self, folder: Path) -> ModelRef:
        """Return a reference to a model that does not exist."""
        return ModelRef(self.key, str(folder / FOREIGN))

    def build(self) -> ModelSource:
        return self.plugin_manager().create(MODEL_SOURCES, self.key)

    def test_two_builds_are_two_objects(self) -> None:
        assert self.build() is not self.build()

    def test_the_files_are_there(self, tmp_path: Path) -> None:
        files = self.build().resolve(self.ref(tmp_path), patterns=["*"])
        assert files.root.is_dir() and files.names
        assert [name for name in files.names if not (files.root / name).is_file()] == []
        assert len(set(files.names)) == len(files.names)
        paths = [Path(name) for name in files.names]
        assert [path for path in paths if path.is_absolute() or ".." in path.parts] == []

    def test_the_configuration_is_that_of_config_json(self, tmp_path: Path) -> None:
        files = self.build().resolve(self.ref(tmp_path), patterns=["*.json"])
        path = files.root / "config.json"
        expected = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        assert dict(files.config) == expected

    def test_only_what_was_asked_for_is_listed(self, tmp_path: Path) -> None:
        source, ref = self.build(), self.ref(tmp_path)
        files = source.resolve(ref, patterns=["*.json"])
        assert [name for name in files.names if not fnmatch(name, "*.json")] == []
        assert source.resolve(ref, patterns=[f"*.{FOREIGN}"]).names == ()

    def test_it_may_be_asked_again(self, tmp_path: Path) -> None:
        source, ref = self.build(), self.ref(tmp_path)
        assert source.resolve(ref, patterns=["*"]) == source.resolve(ref, patterns=["*"])

    def test_a_resolved_revision_stays(self, tmp_path: Path) -> None:
        source, ref = self.build(), self.ref(tmp_path)
        if not isinstance(source, SupportsRevisions):
            return
        pinned = replace(ref, revision=source.resolve_revision(ref))
        assert source.resolve_revision(pinned) == pinned.revision
        now, then = (source.resolve(r, patterns=["*"]) for r in (ref, pinned))
        assert (now.root, now.names) == (then.root, then.names)

    def test_what_is_not_there_is_said_so(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError):
            self.build().resolve(self.missing(tmp_path), patterns=["*"])


class LoadFormatSuite(PluginTest):
    """A loader yields each wanted tensor once, as it was stored. Say how a file is written."""

    def write(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Store ``tensors`` in ``folder``."""
        raise NotImplementedError

    def damage(self, folder: Path) -> None:
        """Damage the files of ``write``. By default every file loses its second half."""
        for path in folder.iterdir():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    def tensors(self) -> dict[str, Tensor]:
        import torch

        generator = torch.Generator().manual_seed(1)
        return {
            "model.a.weight": torch.randn(6, 4, generator=generator),
            "model.a.bias": torch.randn(6, generator=generator).to(torch.bfloat16),
            "model.b.weight": torch.randn(3, 2, 5, generator=generator).to(torch.float16),
            "model.b.scale": torch.randint(-9, 9, (4,), generator=generator, dtype=torch.int8),
            "scalar": torch.tensor(2.5),
        }

    def open(self, folder: Path) -> WeightLoader:
        names = tuple(sorted(path.name for path in folder.iterdir()))
        return self.plugin_manager().create(
            LOAD_FORMATS, self.key, files=ModelFiles(folder, names, {}), seed=0
        )

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        self.write(tmp_path, self.tensors())
        return tmp_path

    def test_every_tensor_comes_as_it_was_stored(self, folder: Path) -> None:
        import torch

        tensors = list(self.open(folder).tensors(lambda name: True))
        assert len(tensors) == len(dict(tensors)), "a tensor came twice"
        expected = self.tensors()
        assert set(dict(tensors)) == set(expected)
        for name, tensor in tensors:
            assert tensor.device.type == "cpu" and tensor.dtype == expected[name].dtype, name
            assert torch.equal(tensor, expected[name]), name

    def test_what_is_not_wanted_does_not_come(self, folder: Path) -> None:
        tensors = self.open(folder).tensors(lambda name: name.startswith("model.a."))
        assert {name for name, _ in tensors} == {"model.a.weight", "model.a.bias"}

    def test_a_loader_may_be_read_twice(self, folder: Path) -> None:
        loader = self.open(folder)
        names = [sorted(n for n, _ in loader.tensors(lambda name: True)) for _ in range(2)]
        assert names[0] == names[1]

    def test_a_file_can_be_named_for_a_tensor(self, folder: Path) -> None:
        loader: Any = self.open(folder)
        if not isinstance(loader, SupportsTensorFiles):
            pytest.skip("it does not say which file holds a tensor")
        reader: Any = loader
        for name, _ in reader.tensors(lambda name: True):
            assert (folder / loader.file_of(name)).is_file()

    def test_a_damaged_file_is_a_checkpoint_error(self, folder: Path) -> None:
        self.damage(folder)
        with pytest.raises(CheckpointError):
            list(self.open(folder).tensors(lambda name: True))
