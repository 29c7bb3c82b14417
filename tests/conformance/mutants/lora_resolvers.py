"""A resolver of adapters in a folder, and what may be wrong with one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mutants.specimen import Mutant, Specimen
from treadle.testing.adapters import LoRAResolverSuite

SOURCE = """
import functools
import json
from pathlib import Path

import msgspec

from treadle.api import impl
from treadle.api.types import LoRA
from treadle.errors import CheckpointError

TREADLE = {"lora_resolvers": ["mine"]}


class Options(msgspec.Struct, frozen=True):
    folder: str


TREADLE_OPTIONS = {"lora_resolvers:mine": Options}


class Mine:
    def __init__(self, folder):
        self.folder = Path(folder)

    def there(self):
        return list(self.folder.iterdir())

    def find(self, name):
        return next((path for path in self.there() if path.name == name), None)

    def resolve(self, name, base_model):
        path = self.find(name)
        if path is None:
            return None
        try:
            config = json.loads((path / "adapter_config.json").read_text())
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        if config["base_model_name_or_path"] != base_model:
            return None
        return LoRA(name, path, config["r"])


def build(folder):
    return Mine(folder)


@impl
def treadle_lora_resolver(name, options):
    return build(options["folder"]) if name == "mine" else None
"""
ANYWHERE = """
        path = self.folder / str(name.replace("\\\\\\\\", "/"))
        try:
            return path if (path / "adapter_config.json").is_file() else None
        except (OSError, ValueError):
            return None
"""


class Resolver(LoRAResolverSuite):
    def settings(self, folder: Path) -> Mapping[str, Any]:
        return {"folder": str(folder)}


FIND = "return next((path for path in self.there() if path.name == name), None)"

SPECIMENS = (
    Specimen(
        suite=Resolver,
        plugin="lora_resolvers:mine",
        source=SOURCE,
        mutants=(
            Mutant("test_two_builds_are_two_objects", {"def build": "@functools.cache\ndef build"}),
            Mutant("test_an_adapter_is_found", {'config["r"]': '2 * config["r"]'}),
            Mutant(
                "test_an_unknown_one_is_none",
                {"path.name == name": "path.name == name.casefold()"},
            ),
            Mutant(
                "test_one_of_another_model_is_none",
                {'config["base_model_name_or_path"] != base_model': '"r" not in config'},
            ),
            Mutant(
                "test_one_that_comes_later_is_found",
                {"def there": "@functools.cache\n    def there"},
            ),
            Mutant("test_no_name_leads_out_of_the_place", {FIND: ANYWHERE.strip()}),
            Mutant(
                "test_names_that_no_file_system_takes_are_unknown",
                {"path.name == name": "path.name.encode() == name.encode()"},
            ),
            Mutant(
                "test_a_damaged_one_is_a_checkpoint_error", {"except ValueError": "except KeyError"}
            ),
        ),
    ),
)
