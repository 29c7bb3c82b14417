"""A checkpoint is data of strangers: every hostile folder is refused by the name of the file."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hostile_folders import MUTATIONS, OUTSIDE, PIPE, link, pipe, write

from treadle import LLM
from treadle.api.files import ModelFiles, ModelRef
from treadle.api.kinds import MODEL_SOURCES
from treadle.errors import CheckpointError, ConfigError, TreadleError
from treadle.loading import fetch
from treadle.plugins import PluginManager
from treadle.testing.checkpoints import make_checkpoint

OPTIONS = {"device": "cpu", "dtype": "float32", "cpu_threads": 1, "num_pages": 16}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("original") / "model",
        tokenizer=True,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
    )


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


@pytest.fixture(scope="module")
def plugins() -> PluginManager:
    return PluginManager()


@pytest.mark.parametrize("case", MUTATIONS)
def test_a_hostile_folder_is_refused(folder: Path, case: str) -> None:
    mutate, problem = MUTATIONS[case]
    mutate(folder)
    with pytest.raises(CheckpointError, match=problem):
        LLM(str(folder), **OPTIONS)


def test_random_weights_have_bounds_too(folder: Path) -> None:
    for changes, problem in (
        ({"num_hidden_layers": 10**12}, "^num_hidden_layers of "),
        ({"vocab_size": 2**24, "hidden_size": 2**24}, "needs more than"),
    ):
        with pytest.raises(CheckpointError, match=problem):
            LLM(str(folder), load_format="dummy", hf_overrides=changes, **OPTIONS)


@pytest.mark.parametrize(
    "architecture",
    ["Qwen3ForCausalLM", "Gemma2ForCausalLM", "MixtralForCausalLM", "Olmo2ForCausalLM"],
)
@pytest.mark.parametrize(
    ("field", "value"), [("num_hidden_layers", 3), ("vocab_size", 2**24), ("hidden_size", 2**22)]
)
def test_sizes_are_compared_for_every_architecture(
    checkpoint: Callable[..., Path], architecture: str, field: str, value: int
) -> None:
    """The last one is built by the fallback, which transformers implements."""
    folder = checkpoint(architecture, num_hidden_layers=2)
    with pytest.raises(CheckpointError, match=r"tensors are those of 2 layers|needs more than \d+"):
        LLM(str(folder), hf_overrides={field: value, "layer_types": None}, **OPTIONS)


# ------------------------------------------------------------------------ what must load


def test_the_cache_of_the_hub_is_made_of_links(original: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    (snapshot / "additional_chat_templates").mkdir(parents=True)
    for number, path in enumerate(sorted(original.iterdir())):
        shutil.copy(path, blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    (blobs / "template").write_text("T{{ messages[0].content }}")
    (snapshot / "additional_chat_templates" / "t.jinja").symlink_to("../../../blobs/template")
    named = tmp_path / "named"
    named.symlink_to(snapshot)
    for folder in (snapshot, named):
        with LLM(str(folder), **OPTIONS) as llm:
            assert llm.info.architecture == "LlamaForCausalLM"
    (snapshot / "chat_template.jinja").unlink()
    link("chat_template.jinja", "../../elsewhere")(snapshot)
    (tmp_path / "elsewhere").write_text("secret")
    with pytest.raises(CheckpointError, match=OUTSIDE.format("chat_template.jinja")):
        LLM(str(named), **OPTIONS)


def test_code_of_a_checkpoint_is_never_run(folder: Path) -> None:
    """The names of classes in ``auto_map`` are ignored in every file that transformers reads them in."""
    marker = folder / "ran"
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Evil: pass\n")
    auto_map = {
        name: "evil.Evil" for name in ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")
    }
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        path = folder / name
        content = json.loads(path.read_text()) if path.exists() else {}
        content |= {"auto_map": auto_map, "trust_remote_code": True}
        path.write_text(json.dumps(content))
    with LLM(str(folder), **OPTIONS):
        pass
    with pytest.raises(TreadleError):
        LLM(str(folder), hf_overrides={"architectures": ["Unknown"], "model_type": "x"}, **OPTIONS)
    assert not marker.exists()


# -------------------------------------------------------------------- every way to a file


@pytest.mark.parametrize("name", ["config.json", "chat_template.jinja", "vocab.json"])
@pytest.mark.parametrize("scheme", ["file", "newest"])
def test_the_host_checks_what_a_source_brings(
    folder: Path, plugins: PluginManager, scheme: str, name: str
) -> None:
    pipe(name)(folder)
    where = folder if scheme == "file" else folder.parent
    with pytest.raises(CheckpointError, match=f"{PIPE.format(name)}|holds no complete checkpoint"):
        fetch(plugins, ModelRef(scheme, str(where)))


def test_every_source_is_checked_after_it_has_answered(
    folder: Path, plugins: PluginManager
) -> None:
    files = plugins.create(MODEL_SOURCES, "file").resolve(
        ModelRef("file", str(folder)), patterns=["*"]
    )

    class Careless:
        """A source of somebody else's, and the plugin manager that brings it."""

        names = files.names

        def create_guarded(self, kind: object, scheme: str) -> Careless:
            return self

        def resolve(self, ref: ModelRef, *, patterns: object) -> ModelFiles:
            return replace(files, names=self.names)

    source: Any = Careless()
    fetch(source, ModelRef("mine", "x"))
    link("weights.npz", "/etc/passwd")(folder)
    source.names = (*files.names, "weights.npz")
    with pytest.raises(CheckpointError, match=OUTSIDE.format("weights.npz")):
        fetch(source, ModelRef("mine", "x"), "numpy")
    source.names = (*files.names, "../secret")
    with pytest.raises(CheckpointError, match=OUTSIDE.format("secret")):
        write("../secret", "")(folder)
        fetch(source, ModelRef("mine", "x"))
    source.names = files.names
    link("merges.txt", "/etc/passwd")(folder)
    with pytest.raises(CheckpointError, match=OUTSIDE.format("merges.txt")):
        fetch(source, ModelRef("mine", "x"), weights=False)


def test_a_folder_of_too_many_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.api.checkpoints.MAX_ENTRIES", 3)
    with pytest.raises(CheckpointError, match="holds more than 3 files"):
        LLM(str(folder), **OPTIONS)


def test_too_many_tensors(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle_weights_kit.headers.MAX_TENSORS", 20)
    with pytest.raises(CheckpointError, match=r"it has \d+ tensors; a checkpoint may have 20"):
        LLM(str(folder), **OPTIONS)
    monkeypatch.undo()
    monkeypatch.setattr("treadle_weights_kit.mapped.MAX_TENSORS", 20)
    with pytest.raises(CheckpointError, match=r"has \d+ tensors in 1 files; a checkpoint may have"):
        LLM(str(folder), **OPTIONS)


def test_files_that_the_user_names(folder: Path, tmp_path: Path) -> None:
    pipe("t.jinja")(tmp_path)
    os.mkfifo(tmp_path / "lock")
    for options, problem in (
        ({"chat_template": str(tmp_path / "t.jinja")}, "chat_template .*named pipe"),
        ({"chat_template": "/dev/zero"}, "chat_template .*a device"),
        ({"chat_template": str(tmp_path)}, "chat_template .*Is a directory"),
        ({"plugin_lock_file": str(tmp_path / "lock")}, "plugin-lock-file .*named pipe"),
        ({"plugin_file": [str(tmp_path / "lock")]}, "plugin-file .*named pipe"),
        (
            {
                "stat_loggers": ["jsonl"],
                "plugin_options": {"stat_loggers:jsonl": {"path": str(tmp_path / "lock")}},
            },
            "jsonl cannot write",
        ),
    ):
        with pytest.raises(ConfigError, match=problem):
            LLM(str(folder), **OPTIONS, **options)  # type: ignore[arg-type]


def test_a_generation_config_of_the_users_own(folder: Path, tmp_path: Path) -> None:
    write("generation_config.json", '{"top_k": 1, "top_k": 2}')(tmp_path)
    with pytest.raises(CheckpointError, match="'top_k' twice"):
        LLM(str(folder), generation_config=str(tmp_path), **OPTIONS)
