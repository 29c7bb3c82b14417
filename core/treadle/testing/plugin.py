"""The conformance suite of every plugin: its entry point, imports, hooks, options and foreign keys.

::

    class TestMine(PluginSuite, PolicySuite):       # the suite of the kind beside it
        plugin = "scheduling_policies:mine"
        options = {"patience": 2.0}                 # options to test it with
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping
from copy import copy
from functools import cached_property, lru_cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from treadle.api.cache import DeviceInfo
from treadle.api.files import ModelFiles
from treadle.config import EngineConfig, PluginConfig
from treadle.plugins import Entry, PluginManager, installed_kinds
from treadle.plugins.entries import normal, scan

if TYPE_CHECKING:
    from treadle.testing.examination.findings import Finding

__all__ = ("FOREIGN", "PluginSuite", "PluginTest", "hook_arguments")

FOREIGN = "a-key-that-nobody-has"
LIGHT = ("cuda", "heavy", "slow")
INSTALLED = ("dependency", "requirement", "stale")


@lru_cache(maxsize=8)
def _installed_entries(path: tuple[str, ...]) -> list[Entry]:
    """Scan once for each ``sys.path``: every check makes a plugin manager."""
    return list(scan())


class PluginTest:
    """The plugin under test. ``plugin_manager`` may be overridden to test one that is not installed."""

    plugin: ClassVar[str]
    """``kind:key``."""
    options: Mapping[str, Any] = {}

    def plugin_manager(self) -> PluginManager:
        """Return a new plugin manager, so that tests share no objects."""
        options = {self.plugin: dict(self.options)} if self.options else {}
        return PluginManager(
            PluginConfig(plugin_options=options),
            source=lambda: map(copy, _installed_entries(tuple(sys.path))),
        )

    @property
    def kind(self) -> str:
        return self.plugin.partition(":")[0]

    @property
    def key(self) -> str:
        return self.plugin.partition(":")[2]

    @cached_property
    def entry(self) -> Entry:
        return self.plugin_manager().choose(self.kind, self.key)


_EXAMINED: dict[tuple[str, type], list[Finding]] = {}


class PluginSuite(PluginTest):
    """Subclass it with ``plugin``; the name must begin with ``Test``."""

    def findings(self) -> list[Finding]:
        """Return the findings of ``treadle doctor``; the import runs in a separate process."""
        from treadle.testing.examination.checks import check

        entry = self.entry
        name = (repr(entry.unloaded(self.key)), type(self))
        if name not in _EXAMINED:
            plugins = self.plugin_manager()
            entries = [e for e in plugins.entries if (e.id, e.dist) == (entry.id, entry.dist)]
            checked, _ = check(plugins, entries, seconds=30.0)
            _EXAMINED[name] = [finding for result in checked for finding in result.findings]
        return _EXAMINED[name]

    def output_text(self, *codes: str) -> list[str]:
        return [f"{f.code}: {f.text}" for f in self.findings() if f.code in codes]

    def test_it_is_found_and_loads(self) -> None:
        handled = {*LIGHT, *INSTALLED}
        problems = [f"{f.code}: {f.text}" for f in self.findings() if f.code not in handled]
        assert problems == []

    def test_its_import_is_light(self) -> None:
        assert self.output_text(*LIGHT) == [], "import what is heavy inside the hooks"

    def test_it_is_installed_as_it_says(self) -> None:
        assert self.output_text(*INSTALLED) == []

    def test_it_asks_for_a_range_of_the_core(self) -> None:
        """A plugin without an upper bound could be installed with a core that it does not support."""
        from packaging.requirements import Requirement

        entry = self.entry
        if entry.file is not None or normal(entry.dist) == "treadle-core":
            pytest.skip("it has no requirements")
        requirements = [Requirement(text) for text in metadata.requires(entry.dist) or []]
        core = [
            requirement
            for requirement in requirements
            if normal(requirement.name) == "treadle-core"
        ]
        assert core, "its dependencies do not name treadle-core"
        operators = {
            specifier.operator for requirement in core for specifier in requirement.specifier
        }
        assert operators & {"<", "<=", "==", "~="}, f"{core[0]} has no upper bound"

    def test_it_leaves_the_keys_of_others_alone(self) -> None:
        """A hook checks its key first, and returns ``None`` for a foreign one."""
        kind = installed_kinds()[self.kind]
        if (
            kind.owner != "treadle-core"
            or kind.mode == "always"
            or kind.hook in ("treadle_attention_backend", "treadle_communicator")
        ):
            pytest.skip("its hook is not asked by key")
        if self.entry.key == "*":
            pytest.skip("it is the fallback: every key is its own")
        plugins = self.plugin_manager()
        plugins.load(self.kind, self.key)
        hooks = plugins.hooks_for(self.kind, self.key)
        result = getattr(hooks, kind.hook)(**hook_arguments(kind.hook, plugins))
        assert not result, f"{kind.hook} answered {result!r} for {FOREIGN!r}"

    def test_its_annotations_agree_with_the_hooks(self) -> None:
        from treadle.api import hookspecs

        plugin = self.plugin_manager().load(self.kind, self.key)
        for name, spec in inspect.getmembers(hookspecs.Plugin, inspect.isfunction):
            impl = getattr(plugin, name, None)
            if not name.startswith("treadle_") or not callable(impl):
                continue
            hook_annotations = spec.__annotations__
            for argument, annotation in getattr(impl, "__annotations__", {}).items():
                if argument != "return" and argument in hook_annotations:
                    actual, expected = (
                        _annotation_text(annotation),
                        _annotation_text(hook_annotations[argument]),
                    )
                    assert actual in ("Any", "object", expected), (
                        f"{name}: {argument} is annotated {actual}, the hook passes {expected}"
                    )

    def test_its_options_are_documented(self) -> None:
        """``treadle plugin show`` and the help pages tell users what each option means."""
        from msgspec.json import schema

        from treadle.api.plugin_options import options_struct

        struct = options_struct(
            self.plugin_manager().load(self.kind, self.key), self.kind, self.entry.key
        )
        if struct is None:
            return
        (described,) = (d for n, d in schema(struct)["$defs"].items() if n == struct.__name__)
        undocumented = [n for n, p in described["properties"].items() if not p.get("description")]
        assert undocumented == [], "give them msgspec.Meta(description=…)"


def hook_arguments(hook: str, plugins: PluginManager) -> dict[str, Any]:
    """Return arguments for a hook with a foreign key: the hook must not use the other arguments."""
    from treadle.api.attention import AttentionRequest, KernelRequest
    from treadle.api.hookspecs import Plugin

    cpu = DeviceInfo("cpu")
    attention = AttentionRequest(cpu, "float32", "float32", 64, 4, 2, 0.125)
    values: dict[str, Any] = {
        "files": ModelFiles(Path("nowhere"), (), {}),
        "tokenizer": None,
        "hf_config": None,
        "checkpoint": {},
        "device": cpu,
        "config": EngineConfig(),
        "plugins": plugins,
        "vocab_size": 8,
        "tools": (),
        "prompt": "",
        "request": KernelRequest(cpu, "float32", {}) if hook == "treadle_kernel_op" else attention,
        "options": {},
    }
    names = [n for n in inspect.signature(getattr(Plugin, hook)).parameters if n != "self"]
    return {name: values.get(name, FOREIGN) for name in names}


def _annotation_text(annotation: Any) -> str:
    """Return an annotation as text, without the modules of its names."""
    if annotation is None:
        return "None"
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    text = re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", text).strip("'\"").replace(" ", "")
    return text.replace("Mapping[str,Any]", "Options")
