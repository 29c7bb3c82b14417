"""The model source ``gguf``: one file, on this machine or in a repository of the hub."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from treadle.api.checkpoints import files_in
from treadle.api.files import ModelFiles, ModelRef
from treadle.errors import CheckpointError
from treadle_gguf.conversion import checkpoint_files
from treadle_gguf.reader import read_header

__all__ = ("GgufSource", "folder_name")

# What is written from a file of the same bytes; a change of the conversion needs another number.
GENERATION = 1
CACHE = Path("~/.cache/treadle/gguf")


class GgufSource:
    """See ``treadle.api.files.ModelSource``.

    ``config.json`` and the tokenizer's files are written once into a folder of the cache, by the place,
    size and time of the file. The file itself stays where it is.
    """

    def resolve(self, ref: ModelRef, *, patterns: Sequence[str]) -> ModelFiles:
        """Return the folder of a file. Raises ``CheckpointError`` if there is none, or a damaged one."""
        path = self._find(ref)
        folder = self._folder(path, ref.download_dir)
        return files_in(folder, patterns, str(path))

    def _find(self, ref: ModelRef) -> Path:
        path = Path(ref.path).expanduser()
        if path.is_file():
            return path.resolve()
        owner, _, rest = ref.path.partition("/")
        name, _, file = rest.partition("/")
        if path.is_absolute() or owner in (".", "..", "~") or not file:
            raise CheckpointError(
                f"there is no file {path}; give a .gguf file, or one of a repository on the hub as "
                "org/name/file.gguf"
            )
        return self._download(f"{owner}/{name}", file, ref)

    @staticmethod
    def _download(repository: str, file: str, ref: ModelRef) -> Path:
        import huggingface_hub

        try:
            path = huggingface_hub.hf_hub_download(
                repository, file, revision=ref.revision, cache_dir=ref.download_dir
            )
        except Exception as error:  # the hub library raises its own, httpx's and OS errors
            raise CheckpointError(
                f"there is no file {ref.path} here, and {file} of {repository} could not be downloaded "
                f"from the hub: {type(error).__name__}: {error}"
            ) from error
        return Path(path)

    @staticmethod
    def _folder(path: Path, cache: str | None) -> Path:
        name = folder_name(path)
        home = (Path(cache) / "gguf" if cache else CACHE).expanduser()
        folder = home / name
        if (folder / "tokenizer.json").is_file():
            return folder
        texts = checkpoint_files(read_header(path))
        try:
            home.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=home, prefix=".") as temporary:
                made = Path(temporary) / name
                made.mkdir()
                for file, text in texts.items():
                    (made / file).write_text(text)
                _rename(made, folder)
        except OSError as error:
            raise CheckpointError(
                f"the configuration of {path} cannot be written to {folder}: {error}; give a folder "
                "that can be written with download_dir"
            ) from error
        return folder


def folder_name(path: Path) -> str:
    """Return the name of the folder for a file, by its place, size and time."""
    state = path.stat()
    key = f"{GENERATION} {path} {state.st_size} {state.st_mtime_ns}"
    return f"{path.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def _rename(made: Path, folder: Path) -> None:
    """Another process may have made the same folder meanwhile, which is then as good, or an earlier start one without a
    tokenizer: its files are replaced one by one."""
    try:
        os.rename(made, folder)
    except OSError:
        if not folder.is_dir():
            raise
        for file in made.iterdir():
            os.replace(file, folder / file.name)
