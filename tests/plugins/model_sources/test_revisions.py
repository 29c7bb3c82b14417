"""Every file of a model comes from one commit, whatever happens to the branch meanwhile."""

from __future__ import annotations

import importlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_hub import FakeHub, fake_hub

from treadle import LLM, AsyncLLM
from treadle.api.files import ModelRef
from treadle.api.kinds import MODEL_SOURCES
from treadle.config import from_options
from treadle.engine.client import EngineClient
from treadle.errors import CheckpointError
from treadle.loading.formats import fetch, pin_revisions
from treadle.plugins import PluginManager

NAME = "org/name"


def files(version: str) -> dict[str, bytes]:
    """A checkpoint; each of its files says of which version it is."""
    config = {"model_type": "llama", "version": version}
    return {
        "config.json": json.dumps(config).encode(),
        "tokenizer.json": f"tokenizer of {version}".encode(),
        "tokenizer_config.json": json.dumps({"version": version}).encode(),
        "model.safetensors": f"weights of {version}".encode(),
    }


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    with fake_hub(NAME) as hub:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        monkeypatch.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
            hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        yield hub


def options(tmp_path: Path, **more: Any) -> Any:
    return from_options({"download_dir": str(tmp_path / "cache"), **more}, model=NAME)


@pytest.mark.parametrize("revision", [None, "main", "v1"])
def test_all_files_are_those_of_the_commit_that_a_name_meant_first(
    hub: FakeHub, tmp_path: Path, caplog: pytest.LogCaptureFixture, revision: str | None
) -> None:
    first = hub.commit(revision or "main", files("first"))
    plugins = PluginManager()
    with caplog.at_level(logging.INFO, "treadle.loading"):
        config = pin_revisions(options(tmp_path, revision=revision), plugins)
    assert config.model.revision == first
    assert f"{NAME} at {revision or 'HEAD'} is revision {first}" in caplog.text

    hub.commit(revision or "main", files("second"))
    hub.paths.clear()
    ref = ModelRef("hf", NAME, config.model.revision, config.model.download_dir)
    for weights in (False, True, True):
        found = fetch(plugins, ref, weights=weights)
        assert found.root.name == first
        assert {n: (found.root / n).read_bytes() for n in found.names}.items() <= files(
            "first"
        ).items()
    assert "model.safetensors" in found.names
    assert [path for path in hub.paths if first not in path] == [], "no path without the commit"


def test_without_a_pin_the_branch_would_be_followed(hub: FakeHub, tmp_path: Path) -> None:
    """What the pin is for: the same reference means other files later."""
    ref = ModelRef("hf", NAME, "main", str(tmp_path))
    roots = set()
    for version in ("first", "second"):
        hub.commit("main", files(version))
        roots.add(fetch(PluginManager(), ref, weights=False).root)
    assert len(roots) == 2


def test_a_tokenizer_has_a_revision_of_its_own(hub: FakeHub, tmp_path: Path) -> None:
    model = hub.commit("main", files("model"))
    tokenizer = hub.commit("fixed", files("tokenizer"))
    pinned = pin_revisions(options(tmp_path, tokenizer_revision="fixed"), PluginManager()).model
    assert (pinned.revision, pinned.tokenizer_revision) == (model, tokenizer)
    pinned = pin_revisions(options(tmp_path, tokenizer=NAME), PluginManager()).model
    assert (pinned.revision, pinned.tokenizer_revision) == (model, model)
    assert pin_revisions(options(tmp_path), PluginManager()).model.tokenizer_revision is None


def test_a_commit_is_not_looked_up(hub: FakeHub, tmp_path: Path) -> None:
    commit = hub.commit("main", files("first"))
    pinned = pin_revisions(options(tmp_path, revision=commit), PluginManager())
    assert (pinned.model.revision, hub.paths) == (commit, [])


def test_a_revision_that_does_not_exist_is_named(hub: FakeHub, tmp_path: Path) -> None:
    hub.commit("main", files("first"))
    with pytest.raises(CheckpointError, match=f"'{NAME}' has no revision 'v9' on the hub"):
        pin_revisions(options(tmp_path, revision="v9"), PluginManager())


def test_a_token_goes_to_the_hub_and_not_to_where_it_redirects(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with fake_hub(NAME) as storage:
        hub.storage_url = storage.url
        storage.commits[hub.commit("main", files("first"))] = files("first")
        config = pin_revisions(options(tmp_path), PluginManager()).model
        ref = ModelRef("hf", NAME, config.revision, config.download_dir)
        found = fetch(PluginManager(), ref)
    assert (found.root / "model.safetensors").read_bytes() == files("first")["model.safetensors"]
    assert set(hub.tokens) == {"Bearer hf_secret"}
    assert storage.tokens and set(storage.tokens) == {None}


# ------------------------------------------------------------------------- the engines

MOVING = """
from dataclasses import replace
from treadle.api import impl
from treadle.api.kinds import MODEL_SOURCES
from treadle.plugins import PluginManager

REVISIONS = []


class Moving:
    def resolve_revision(self, ref):
        REVISIONS.append("looked up")
        return "pinned"

    def resolve(self, ref, *, patterns):
        REVISIONS.append(ref.revision)
        demo = PluginManager().create(MODEL_SOURCES, "demo")
        return demo.resolve(replace(ref, scheme="demo", revision=None), patterns=patterns)


@impl
def treadle_model_source(scheme):
    return Moving() if scheme == "moving" else None
"""


def test_the_engine_reads_what_the_frontend_reads(site: Any) -> None:
    module = site.install(
        "moving-source", {"treadle.model_sources": {"moving": "moving_source"}}, MOVING
    )
    with LLM(model="moving:treadle-demo", device="cpu", num_pages=16, max_num_seqs=1) as llm:
        assert llm.config.model.revision is None, "a restart takes what is newest then"
    revisions = importlib.import_module(module).REVISIONS
    assert revisions[0] == "looked up"
    assert len(revisions) > 2 and set(revisions[1:]) == {"pinned"}


async def test_the_engine_process_gets_the_resolved_revision(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.commit("main", files("first"))
    revisions = []

    async def start(_: EngineClient, config: Any) -> Any:
        revisions.append(config.model.revision)
        raise CheckpointError("enough")

    monkeypatch.setattr(EngineClient, "start", start)
    engine = AsyncLLM(config=options(tmp_path, revision="main"))
    with pytest.raises(CheckpointError):
        await engine.start()
    assert revisions == [commit]


def test_newest_stays_with_the_checkpoint_that_it_chose(tmp_path: Path) -> None:
    def write(name: str) -> None:
        folder = tmp_path / name
        folder.mkdir()
        for file, data in files(name).items():
            (folder / file).write_bytes(data)

    write("step-1")
    source = PluginManager().create(MODEL_SOURCES, "newest")
    ref = ModelRef("newest", str(tmp_path))
    revision = source.resolve_revision(ref)
    write("step-2")
    for changed in (tmp_path / "step-2").iterdir():
        os.utime(changed, (4e9, 4e9))
    assert source.resolve(ref, patterns=["*"]).root.name == "step-2"
    pinned = ModelRef("newest", str(tmp_path), revision)
    assert source.resolve(pinned, patterns=["*"]).root.name == "step-1"
    with pytest.raises(CheckpointError, match="no complete checkpoint 'step-3'"):
        source.resolve(ModelRef("newest", str(tmp_path), "step-3"), patterns=["*"])
