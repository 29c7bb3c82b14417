"""Finding checkpoints: references, folders, and what is said when there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from treadle.api.files import ModelFiles, ModelRef
from treadle.api.kinds import MODEL_SOURCES
from treadle.errors import CheckpointError
from treadle.loading import fetch, parse_ref
from treadle.loading.sources import FolderSource, treadle_model_source


@pytest.mark.parametrize(
    ("text", "scheme", "path"),
    [
        ("org/name", "hf", "org/name"),
        ("gpt2", "hf", "gpt2"),
        ("hf:org/name", "hf", "org/name"),
        ("demo:treadle-demo", "demo", "treadle-demo"),
        ("S3://bucket/key", "s3", "//bucket/key"),
        ("/no/such/folder", "file", "/no/such/folder"),
        ("./here", "file", "here"),
        ("file:/some/where", "file", "/some/where"),
        ("file:///some/where", "file", "/some/where"),
        ("  org/name ", "hf", "org/name"),
    ],
)
def test_references(text: str, scheme: str, path: str) -> None:
    ref = parse_ref(text)
    assert (ref.scheme, ref.path) == (scheme, path)


def test_an_existing_folder_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert parse_ref("org/name") == ModelRef("file", "org/name")
    assert parse_ref("org/other", "v1", "/cache") == ModelRef("hf", "org/other", "v1", "/cache")


def test_an_empty_reference_is_refused() -> None:
    with pytest.raises(CheckpointError, match="is empty"):
        parse_ref("  ")


def test_the_hook_knows_its_scheme() -> None:
    assert isinstance(treadle_model_source("file"), FolderSource)
    assert treadle_model_source("s3") is None


def test_a_folder_gives_the_files_that_match(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "a.safetensors").write_bytes(b"")
    (tmp_path / "a.bin").write_bytes(b"")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "b.safetensors").write_bytes(b"")
    files = FolderSource().resolve(
        ModelRef("file", str(tmp_path)), patterns=["*.json", "*.safetensors"]
    )
    assert files.names == ("a.safetensors", "config.json")
    assert files.config == {"model_type": "llama"}


@pytest.mark.parametrize("text", ["{", "[1]", "\xff\xfe"])
def test_a_broken_configuration_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"config\.json of "):
        FolderSource().resolve(ModelRef("file", str(tmp_path)), patterns=["*"])


def test_a_missing_folder_and_a_file_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        FolderSource().resolve(ModelRef("file", str(tmp_path / "nowhere")), patterns=["*"])
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match="is a file, not a folder"):
        FolderSource().resolve(ModelRef("file", str(tmp_path / "model.gguf")), patterns=["*"])


# ----------------------------------------------------------------------------- fetching


class Recorder:
    """A plugin manager with one source that has some files, and remembers what was asked of it."""

    def __init__(self, *names: str) -> None:
        self.names, self.requests = names, []

    def create_guarded(self, kind: Any, scheme: str) -> Recorder:
        assert (kind, scheme) == (MODEL_SOURCES, "hf")
        return self

    def resolve(self, ref: ModelRef, *, patterns: Any) -> ModelFiles:
        from fnmatch import fnmatch

        self.requests.append(list(patterns))
        matches = tuple(n for n in self.names if any(fnmatch(n, p) for p in patterns))
        return ModelFiles(Path("/nowhere"), matches, {})


REF = ModelRef("hf", "org/name")


def test_safetensors_are_preferred() -> None:
    plugins = Recorder("config.json", "model.safetensors", "pytorch_model.bin")
    assert fetch(plugins, REF).names == ("config.json", "model.safetensors")


def test_pytorch_files_are_taken_only_by_name() -> None:
    plugins = Recorder("config.json", "pytorch_model.bin", "model.pt", "model.pth")
    with pytest.raises(CheckpointError, match=r"read only with load_format 'pt'"):
        fetch(plugins, REF)
    assert "*.bin" not in str(plugins.requests)
    assert fetch(plugins, REF, "pt").names == plugins.names


def test_without_weights_nothing_large_is_downloaded() -> None:
    for arguments in ({"weights": False}, {"load_format": "dummy"}):
        plugins = Recorder("config.json", "model.safetensors")
        assert fetch(plugins, REF, **arguments).names == ("config.json",)


def test_a_checkpoint_without_weights_is_refused() -> None:
    with pytest.raises(CheckpointError, match="org/name has no weights"):
        fetch(Recorder("config.json"), REF)
