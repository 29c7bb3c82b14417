"""A loader of safetensors, and what may be wrong with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mutants.specimen import Mutant, Specimen
from treadle.testing.sources import LoadFormatSuite

SOURCE = """
from treadle.api import impl
from treadle.errors import CheckpointError
from treadle_weights_kit.mapped import SafetensorsLoader

TREADLE = {"load_formats": ["mine"]}


class Mine:
    def __init__(self, files):
        self.inner = SafetensorsLoader(files)
        self.left = 9

    def tensors(self, should_load):
        self.left -= 1
        for name, tensor in self.inner.tensors(should_load):
            yield name, tensor

    def file_of(self, name):
        return self.inner.file_of(name)


@impl
def treadle_load_format(format, files):
    return Mine(files) if format == "mine" else None
"""


class Format(LoadFormatSuite):
    def write(self, folder: Path, tensors: Any) -> None:
        from safetensors.torch import save_file

        save_file(dict(tensors), folder / "model.safetensors")


SPECIMENS = (
    Specimen(
        suite=Format,
        plugin="load_formats:mine",
        source=SOURCE,
        mutants=(
            Mutant(
                "test_every_tensor_comes_as_it_was_stored",
                {"yield name, tensor": "yield name, tensor.float()"},
            ),
            Mutant(
                "test_what_is_not_wanted_does_not_come",
                {"tensors(should_load):": "tensors(lambda n: True):"},
            ),
            Mutant(
                "test_a_loader_may_be_read_twice",
                {"self.left -= 1": "self.left -= 8", "yield name": "if self.left > 0: yield name"},
            ),
            Mutant(
                "test_a_file_can_be_named_for_a_tensor",
                {"return self.inner.file_of(name)": 'return "elsewhere"'},
            ),
            Mutant(
                "test_a_damaged_file_is_a_checkpoint_error",
                {
                    "        for name, tensor in": "        try:\n            list(self.inner.tensors(should_load))\n        except CheckpointError:\n            raise ValueError from None\n        for name, tensor in"
                },
            ),
        ),
    ),
)
