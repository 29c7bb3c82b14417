"""References to checkpoints, and the source ``file``: a folder on the local disk."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from treadle.api.checkpoints import files_in
from treadle.api.files import ModelFiles, ModelRef, ModelSource
from treadle.api.hookspecs import impl
from treadle.errors import CheckpointError

__all__ = ("FolderSource", "parse_ref", "treadle_model_source")

SCHEME = re.compile(r"([a-z][a-z0-9+.-]*):(?!\\)(.+)", re.IGNORECASE)


@impl
def treadle_model_source(scheme: str) -> ModelSource | None:
    """Return the source ``file``."""
    return FolderSource() if scheme == "file" else None


def parse_ref(text: str, revision: str | None = None, download_dir: str | None = None) -> ModelRef:
    """Parse the user's model name.

    An existing folder or a text that looks like a path is a ``file``, ``scheme:path`` has its own
    scheme, a file ``.gguf`` has the scheme of its format, and anything else is a name on the hub. Raises ``CheckpointError`` if ``text`` is empty.
    """
    text = text.strip()
    if not text:
        raise CheckpointError(
            "the model is empty; give a folder, a hub name (org/name) or scheme:path"
        )
    folder = Path(text).expanduser()
    if folder.is_dir() or text.startswith(("/", "./", "../", "~")) or text in (".", ".."):
        scheme = "gguf" if folder.suffix.lower() == ".gguf" and not folder.is_dir() else "file"
        return ModelRef(scheme, str(folder), revision, download_dir)
    if text.lower().endswith(".gguf"):
        text = f"gguf:{re.sub('^(gguf|file|hf):(//)?', '', text, flags=re.IGNORECASE)}"
    if match := SCHEME.fullmatch(text):
        scheme, path = match[1].lower(), match[2]
        if scheme == "file":
            path = str(Path(path.removeprefix("//")).expanduser())
        return ModelRef(scheme, path, revision, download_dir)
    return ModelRef("hf", text, revision, download_dir)


class FolderSource:
    """A folder on the local disk."""

    def resolve(self, ref: ModelRef, *, patterns: Sequence[str]) -> ModelFiles:
        """Return the folder's files. Raises ``CheckpointError`` if the folder does not exist."""
        root = Path(ref.path).expanduser()
        if ref.revision is not None:
            raise CheckpointError(
                f"the revision is {ref.revision!r}, but the model {root} is a folder, which has no "
                "revisions: leave it out, or give the name of a checkpoint on the hub (org/name)"
            )
        if not root.is_dir():
            problem = "is a file, not a folder" if root.exists() else "does not exist"
            raise CheckpointError(
                f"the model folder {root} {problem}; give the folder with config.json, or the "
                "name of a checkpoint on the hub (org/name)"
            )
        return files_in(root, patterns, str(root))
