"""The demo model of treadle: a checkpoint inside a package, found by the scheme ``demo``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from treadle.api.checkpoints import files_in
from treadle.api.files import ModelFiles, ModelRef, ModelSource
from treadle.api.hookspecs import impl
from treadle.errors import CheckpointError

__all__ = ("DemoSource", "treadle_model_source")

NAME = "treadle-demo"
FOLDER = Path(__file__).with_name("model")


@impl
def treadle_model_source(scheme: str) -> ModelSource | None:
    """Open the scheme ``demo``, which has one model."""
    return DemoSource() if scheme == "demo" else None


class DemoSource:
    """The model that comes with this package; nothing is downloaded."""

    def resolve(self, ref: ModelRef, *, patterns: Sequence[str]) -> ModelFiles:
        """Raises ``CheckpointError`` for another name or revision, or when files are missing."""
        if ref.path not in ("", NAME):
            raise CheckpointError(
                f"there is no demo model {ref.path!r}; the only one is demo:{NAME}"
            )
        if ref.revision is not None:
            raise CheckpointError(
                f"demo:{NAME} has no revision {ref.revision!r}; it comes with the installed "
                "treadle-demo, so leave the revision out"
            )
        if not (FOLDER / "config.json").is_file():
            raise CheckpointError(f"the demo model in {FOLDER} is missing; install treadle again")
        return files_in(FOLDER, patterns, f"demo:{NAME}")
