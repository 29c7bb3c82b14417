"""The conformance suite of adapter resolvers: what is there is found, whatever clients ask for.

::

    class TestMine(PluginSuite, LoRAResolverSuite):
        plugin = "lora_resolvers:mine"

        def settings(self, folder):     # the options with which it finds adapters in a folder
            return {"folder": str(folder)}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from treadle.api.engine import LoRA, LoRAResolver
from treadle.api.kinds import LORA_RESOLVERS
from treadle.errors import CheckpointError
from treadle.testing.plugin import FOREIGN, PluginTest

__all__ = ("LoRAResolverSuite",)

BASE = "org/base"


class LoRAResolverSuite(PluginTest):
    """Adapters are folders in the form of PEFT, inside of one folder, unless ``write`` says more."""

    def settings(self, folder: Path) -> Mapping[str, Any]:
        """The options of the plugin; ``folder`` is empty and yours."""
        raise NotImplementedError

    def write(self, folder: Path, name: str, rank: int) -> None:
        """Put an adapter for ``BASE`` where the resolver finds it."""
        config = {"peft_type": "LORA", "r": rank, "base_model_name_or_path": BASE}
        (folder / name).mkdir(parents=True)
        (folder / name / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        (folder / name / "adapter_model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")

    def damage(self, folder: Path, name: str) -> None:
        """Spoil it. By default every file loses its second half."""
        for path in (folder / name).iterdir():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    def open(self, folder: Path) -> LoRAResolver:
        self.options = self.settings(folder)
        (made,) = [self.host().create(LORA_RESOLVERS, self.key)]
        return made

    @pytest.fixture
    def place(self, tmp_path: Path) -> Path:
        """The folder of the adapters, beside which lies one that is not served."""
        self.write(tmp_path, "outside", 4)
        folder = tmp_path / "adapters"
        folder.mkdir()
        return folder

    def test_two_builds_are_two_objects(self, place: Path) -> None:
        assert self.open(place) is not self.open(place)

    def test_an_adapter_is_found(self, place: Path) -> None:
        for name, rank in (("french", 8), ("v1.2_legal", 16)):
            self.write(place, name, rank)
            found: Any = self.open(place).resolve(name, BASE)
            assert isinstance(found, LoRA) and (found.name, found.rank) == (name, rank)
            assert Path(found.path).is_dir()

    def test_an_unknown_one_is_none(self, place: Path) -> None:
        self.write(place, "french", 8)
        resolver = self.open(place)
        for name in (FOREIGN, "French", "frenc", "french2"):
            assert resolver.resolve(name, BASE) is None

    def test_one_of_another_model_is_none(self, place: Path) -> None:
        self.write(place, "french", 8)
        assert self.open(place).resolve("french", "org/another") is None

    def test_one_that_comes_later_is_found(self, place: Path) -> None:
        """That there was none is not remembered: nobody restarts a server for an adapter."""
        resolver = self.open(place)
        assert resolver.resolve("french", BASE) is None
        self.write(place, "french", 8)
        assert resolver.resolve("french", BASE) is not None

    def test_no_name_leads_out_of_the_place(self, place: Path) -> None:
        """A client chooses the name."""
        self.write(place, "french", 8)
        resolver, outside = self.open(place), place.parent / "outside"
        for name in ("../outside", str(outside), "french/../../outside", "..\\outside"):
            assert resolver.resolve(name, BASE) is None, name

    def test_names_that_no_file_system_takes_are_unknown(self, place: Path) -> None:
        self.write(place, "french", 8)
        resolver = self.open(place)
        for name in ("", ".", "..", "/", "french\0", "a" * 5000, "\ud800"):
            assert resolver.resolve(name, BASE) is None, name[:20]

    def test_a_damaged_one_is_a_checkpoint_error(self, place: Path) -> None:
        self.write(place, "french", 8)
        resolver = self.open(place)
        self.damage(place, "french")
        with pytest.raises(CheckpointError):
            resolver.resolve("french", BASE)
