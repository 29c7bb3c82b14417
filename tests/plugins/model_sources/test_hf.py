"""The hub: what it is asked for, its cache, and what to do when it has nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from treadle_hf import treadle_model_source
from treadle_hf.source import HubSource

from treadle.api.files import ModelRef
from treadle.errors import CheckpointError


def test_the_hook_knows_its_scheme() -> None:
    assert isinstance(treadle_model_source("hf"), HubSource)
    assert treadle_model_source("file") is None


def test_the_hub_is_asked_for_the_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call: dict[str, Any] = {}

    def download(name: str, **arguments: Any) -> str:
        call.update(arguments, name=name)
        (tmp_path / "config.json").write_text("{}")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    files = HubSource().resolve(ModelRef("hf", "a/b", "main", "/somewhere"), patterns=["*.json"])
    assert files.root == tmp_path
    assert call["name"] == "a/b"
    assert call["revision"] == "main"
    assert call["cache_dir"] == "/somewhere"
    assert call["allow_patterns"] == ["*.json"]
    assert "consolidated*" in call["ignore_patterns"], "a second copy of the weights"


def cached(folder: Path, name: str) -> None:
    """The hub's cache with one snapshot, as its library lays it out."""
    home = folder / f"models--{name.replace('/', '--')}"
    snapshot = home / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("0" * 40)
    (snapshot / "config.json").write_text(json.dumps({"model_type": "llama"}))


def test_offline_the_cache_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    cached(tmp_path, "org/name")
    files = HubSource().resolve(
        ModelRef("hf", "org/name", None, str(tmp_path)), patterns=["*.json"]
    )
    assert files.config == {"model_type": "llama"}


def test_offline_without_a_cache_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    ref = ModelRef("hf", "org/other", None, str(tmp_path))
    with pytest.raises(
        CheckpointError, match=r"'org/other' is not in the local cache and HF_HUB_OFF"
    ):
        HubSource().resolve(ref, patterns=["*.json"])


@pytest.mark.parametrize("name", ["a/b/c", "what is this?", "../up"])
def test_what_is_no_name_is_refused_without_a_request(name: str) -> None:
    with pytest.raises(CheckpointError, match="neither an existing folder nor a hub name"):
        HubSource().resolve(ModelRef("hf", name), patterns=["*"])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("GatedRepoError", "is gated; accept its licence"),
        ("RepositoryNotFoundError", "no folder and no hub checkpoint 'a/b' at revision 'v1'"),
        ("RevisionNotFoundError", "'a/b' has no revision 'v1'"),
        ("LocalEntryNotFoundError", "could not be downloaded: LocalEntryNotFoundError"),
    ],
)
def test_errors_of_the_hub_say_what_to_do(
    kind: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import errors

    def fail(*_: Any, **__: Any) -> str:
        error = getattr(errors, kind)
        raise error.__new__(error)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(CheckpointError, match=message):
        HubSource().resolve(ModelRef("hf", "a/b", "v1"), patterns=["*"])
