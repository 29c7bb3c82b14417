"""A policy that is installed as a distribution, and what may be wrong with any plugin."""

from __future__ import annotations

from mutants.specimen import Mutant, Specimen
from treadle.testing.plugin import PluginSuite

METADATA = """Metadata-Version: 2.1
Name: mine
Version: 1.0
Requires-Dist: treadle-core>=0.0.1,<99
"""
SOURCE = """
from typing import Annotated

import msgspec
from treadle.api import impl


class Options(msgspec.Struct, frozen=True):
    depth: Annotated[int, msgspec.Meta(description="How deep.")] = 1


TREADLE_OPTIONS = {"scheduling_policies:mine": Options}


class Mine:
    def sort_key(self, request):
        return (request.arrival_time,)

    def select_victim(self, running):
        return 0


@impl
def treadle_scheduling_policy(name: str):
    return Mine() if name == "mine" else None
"""

SPECIMENS = (
    Specimen(
        suite=PluginSuite,
        plugin="scheduling_policies:mine",
        source=SOURCE,
        metadata=METADATA,
        mutants=(
            Mutant("test_it_is_found_and_loads", {'"scheduling_policies:mine"': '"policy:mine"'}),
            Mutant("test_its_import_is_light", {"import msgspec": "import msgspec\nimport numpy"}),
            Mutant(
                "test_it_is_installed_as_it_says",
                {"Requires-Dist": "Requires-Dist: nobody-wrote-this\nRequires-Dist"},
            ),
            Mutant("test_it_asks_for_a_range_of_the_core", {",<99": ""}),
            Mutant("test_it_leaves_the_keys_of_others_alone", {' if name == "mine" else None': ""}),
            Mutant("test_its_annotations_agree_with_the_hooks", {"name: str": "name: int"}),
            Mutant("test_its_options_are_documented", {'description="How deep."': "ge=0"}),
        ),
    ),
)
