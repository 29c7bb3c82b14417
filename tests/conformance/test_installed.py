"""The suites of ``treadle.testing`` over everything that is installed, ours and others'.

A plugin that is installed later is tested by the same command. Our own have no other door: what a
suite must know of a plugin (a file that it can read, arguments that it takes) stands in ``ABOUT``
or, where a suite cannot run without, keeps it to ``PluginSuite``. Plugins whose own tests run these
suites, with more cases, are left out.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from treadle.api.files import ModelRef
from treadle.plugins import Entry, PluginManager
from treadle.testing.catalog import suite_of
from treadle.testing.examination.findings import editable_folder
from treadle.testing.logits import LogitsProcessorSuite
from treadle.testing.plugin import PluginSuite
from treadle.testing.sources import LoadFormatSuite, ModelSourceSuite

pytestmark = pytest.mark.early


class Folder(ModelSourceSuite):
    def ref(self, folder: Path) -> ModelRef:
        (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
        (folder / "model.safetensors").write_bytes(b"")
        return ModelRef("file", str(folder))


class Demo(ModelSourceSuite):
    def ref(self, folder: Path) -> ModelRef:
        return ModelRef("demo", "treadle-demo")


class Newest(ModelSourceSuite):
    def ref(self, folder: Path) -> ModelRef:
        from safetensors.torch import save_file

        checkpoint = folder / "step-1"
        checkpoint.mkdir(exist_ok=True)
        (checkpoint / "config.json").write_text(json.dumps({"model_type": "llama"}))
        save_file({}, checkpoint / "model.safetensors")
        return ModelRef("newest", str(folder))


class Hub(ModelSourceSuite):
    """The hub's cache, as its library lays it out, without the network."""

    @pytest.fixture(autouse=True)
    def without_network(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def ref(self, folder: Path) -> ModelRef:
        home = folder / "models--org--name"
        snapshot = home / "snapshots" / ("0" * 40)
        for directory in (snapshot, home / "refs"):
            directory.mkdir(parents=True, exist_ok=True)
        (home / "refs" / "main").write_text("0" * 40)
        (snapshot / "config.json").write_text(json.dumps({"model_type": "llama"}))
        return ModelRef("hf", "org/name", None, str(folder))


class Safetensors(LoadFormatSuite):
    def write(self, folder: Path, tensors: Any) -> None:
        from safetensors.torch import save_file

        items = sorted(tensors.items())
        save_file(dict(items[:2]), folder / "model-00001-of-00002.safetensors")
        save_file(dict(items[2:]), folder / "model-00002-of-00002.safetensors")


class Torch(LoadFormatSuite):
    def write(self, folder: Path, tensors: Any) -> None:
        import torch

        torch.save(dict(tensors), folder / "pytorch_model.bin")


class RepetitionWindow(LogitsProcessorSuite):
    arguments = ({"ngram": 2}, {"ngram": 3, "window": 16}, {})
    refused = ({"ngram": 0}, {"ngram": 65}, {"window": -1}, {"n": 3}, "2", None)


class ThinkingBudget(LogitsProcessorSuite):
    arguments = (
        {"max_tokens": 2, "end": [5]},
        {"max_tokens": 0, "end": [3, 4], "prompt_tokens": 1},
        {"max_tokens": 1, "end": [3], "begin": 7, "stops": [9]},
    )
    refused = (
        {"max_tokens": 2},
        {"max_tokens": -1, "end": [1]},
        {"max_tokens": 1, "end": []},
        {"max_tokens": 1, "end": [1], "n": 3},
        "2",
        None,
    )


ABOUT: dict[str, type] = {
    "model_sources:file": Folder,
    "model_sources:demo": Demo,
    "model_sources:hf": Hub,
    "model_sources:newest": Newest,
    "load_formats:safetensors": Safetensors,
    "load_formats:bitsandbytes": Safetensors,
    "load_formats:hqq": Safetensors,
    "load_formats:quark": Safetensors,
    "load_formats:torchao": Safetensors,
    "load_formats:pt": Torch,
    "logits_processors:repetition_window": RepetitionWindow,
    "logits_processors:thinking_budget": ThinkingBudget,
}

GIVEN: dict[str, dict[str, Any]] = {
    "commands:batch": {"refused": [[], ["-i", "/nowhere", "-o", "/nowhere/x"]]},
    "commands:bench": {"refused": [["latency", "/nowhere"]]},
    "commands:chat": {"refused": [["/nowhere"], ["--top-p", "2", "/nowhere"]]},
    "commands:doctor": {"refused": [["--only", "nothing"]]},
    "commands:generate": {"refused": [["/nowhere"], ["--max-tokens", "x"]]},
    "commands:models": {"accepted": [["--json"]], "refused": [["/nowhere"]]},
    "commands:plugin": {
        "accepted": [["list", "--json"], ["show", "scheduling_policies:fcfs"]],
        "refused": [
            ["show", "scheduling_policies:nothing"],
            ["new", "nothing", "x"],
            ["lock", "/nowhere/x"],
        ],
    },
    "commands:quantize": {
        "refused": [[], ["/nowhere", "-m", "fp8", "-o", "/nowhere/x"], ["/nowhere", "-m", "awq"]]
    },
    "commands:run": {"refused": [[], ["/nowhere"], ["--max-tokens", "x"]]},
    "commands:run-batch": {"refused": [[], ["-i", "/nowhere", "-o", "/nowhere/x"]]},
    "commands:serve": {"refused": [["/nowhere"], ["--port", "-1"]]},
    "models:MistralForCausalLM": {"variants": {"plain": {"sliding_window": 12}}},
    "stat_loggers:jsonl": {"options": {"path": "/dev/null", "seconds": 0}},
}
"""What the suites are told of some plugins."""


def own_suites() -> Iterator[str]:
    """The ids of the plugins for which a module of ``tests/plugins`` runs ``PluginSuite`` and a suite of the kind."""
    for path in Path(__file__).parents[1].glob("plugins/**/test_*.py"):
        bases: dict[str, set[str]] = {}
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.ClassDef) or node.decorator_list:
                continue  # marked as slow, or for a card
            names = {base.id for base in node.bases if isinstance(base, ast.Name)}
            bases[node.name] = names.union(*(bases.get(name, ()) for name in names))
            if "PluginSuite" in bases[node.name] and len(bases[node.name]) > 1:
                yield from (
                    ast.literal_eval(line.value)
                    for line in node.body
                    if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "plugin"
                )


def installed() -> Iterator[tuple[Entry, type]]:
    """Every entry with its suite; ``object`` where the kind has none that runs by itself."""
    for entry in PluginManager().entries:
        if entry.usable and entry.key != "*":
            yield entry, ABOUT.get(entry.id) or suite_of(entry.kind) or object


def suite(entry: Entry, kind: type) -> type:
    """The test class of one entry."""
    parts = (PluginSuite,) if kind is object else (PluginSuite, kind)
    about: dict[str, Any] = {"plugin": entry.id, **GIVEN.get(entry.id, {})}
    name = "".join(c if c.isalnum() else "_" for c in f"Test_{entry.id}")
    return type(name, parts, about)


# Starting its cluster takes longer than all others together; inline and processes run each check.
SLOW = {"executors:ray"}

WITH_OWN_SUITE = frozenset(own_suites())

for _entry, _kind in installed():
    if _entry.id in WITH_OWN_SUITE:
        continue
    _class = suite(_entry, _kind)
    if _entry.id in SLOW:
        _class = pytest.mark.slow(_class)
    globals()[_class.__name__] = _class


def test_every_plugin_of_this_repository_is_tested() -> None:
    from repository import members

    distributions = {entry.dist for entry in PluginManager().entries}
    ids = {
        e.id for member in members() if member.name in distributions for e in member.entry_points
    }
    names = {c.plugin for c in globals().values() if isinstance(c, type) and hasattr(c, "plugin")}
    assert ids and ids - names <= {"models:*"} | WITH_OWN_SUITE
    assert len(WITH_OWN_SUITE & ids) > 20


def test_our_kinds_have_suites() -> None:
    """What has only ``PluginSuite`` here is tested elsewhere or called by nobody."""
    bare = {e.id for e, kind in installed() if kind is object and editable_folder(e.dist)}
    assert {name.partition(":")[0] for name in bare} <= ELSEWHERE | {
        "load_formats",
        "model_sources",
    }
    assert "load_formats:safetensors" not in bare


# attention, structured output, parsers and quantization: their own suites, in tests/plugins and tests/core.
ELSEWHERE = {
    "attention_backends",
    "structured_output",
    "quantization",
    "reasoning_parsers",
    "tool_parsers",
}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
