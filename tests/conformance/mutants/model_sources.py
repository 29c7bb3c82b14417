"""A source that is a folder, and what may be wrong with one."""

from __future__ import annotations

from pathlib import Path

from mutants.specimen import SHARED, Mutant, Specimen
from treadle.api.files import ModelRef
from treadle.testing.sources import ModelSourceSuite

SOURCE = """
from treadle.api import impl
from treadle.api.files import ModelFiles, ModelRef
from treadle.loading.sources import FolderSource

TREADLE = {"model_sources": ["mine"]}


class Mine:
    calls = 0

    def resolve_revision(self, ref):
        return ref.revision or "main"

    def resolve(self, ref, *, patterns):
        self.calls += 1
        found = FolderSource().resolve(ModelRef(ref.scheme, ref.path), patterns=patterns)
        return ModelFiles(found.root, found.names, found.config)


@impl
def treadle_model_source(scheme):
    return Mine() if scheme == "mine" else None
"""


class Source(ModelSourceSuite):
    def ref(self, folder: Path) -> ModelRef:
        (folder / "config.json").write_text('{"model_type": "x"}')
        (folder / "weights.bin").write_bytes(b"")
        return ModelRef("mine", str(folder))


SPECIMENS = (
    Specimen(
        suite=Source,
        plugin="model_sources:mine",
        source=SOURCE,
        mutants=(
            Mutant("test_two_builds_are_two_objects", SHARED),
            Mutant(
                "test_the_files_are_there",
                {"found.names,": 'tuple(n.replace("weights", "w") for n in found.names),'},
            ),
            Mutant(
                "test_the_files_are_there",
                {"found.names,": "tuple(f'../{found.root.name}/{name}' for name in found.names),"},
            ),
            Mutant(
                "test_the_configuration_is_that_of_config_json",
                {"found.config)": '{"model_type": "y"})'},
            ),
            Mutant(
                "test_only_what_was_asked_for_is_listed", {"patterns=patterns)": 'patterns=["*"])'}
            ),
            Mutant(
                "test_it_may_be_asked_again",
                {"found.config)": "found.config if self.calls == 1 else {})"},
            ),
            Mutant(
                "test_a_resolved_revision_stays", {'ref.revision or "main"': 'f"{ref.revision}-1"'}
            ),
            Mutant(
                "test_what_is_not_there_is_said_so",
                {
                    "        found = ": "        from pathlib import Path\n        if not Path(ref.path).is_dir():\n            return ModelFiles(Path(ref.path), (), {})\n        found = "
                },
            ),
        ),
    ),
)
