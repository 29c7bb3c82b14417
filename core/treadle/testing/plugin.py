"""What every plugin promises, whatever its kind: found, light, sound, and silent about others' keys.

::

    class TestMine(PluginSuite, PolicySuite):       # the suite of the kind beside it
        plugin = "scheduling_policies:mine"
        options = {"patience": 2.0}                 # options to test it with
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from treadle.api.cache import ConnectorRole, DeviceInfo, KVCacheLayout
from treadle.api.files import ModelFiles
from treadle.config import EngineConfig, PluginConfig
from treadle.plugins import Entry, PluginManager, installed_kinds
from treadle.plugins.entries import normal

if TYPE_CHECKING:
    from treadle.testing.examination.findings import Finding

__all__ = ("FOREIGN", "PluginSuite", "PluginTest", "hook_arguments")

FOREIGN = "a-key-that-nobody-has"
LIGHT = ("cuda", "heavy", "slow")
INSTALLED = ("dependency", "requirement", "stale")


class PluginTest:
    """The plugin under test. ``host`` may be overridden to test one that is not installed."""

    plugin: ClassVar[str]
    """``kind:key``."""
    options: Mapping[str, Any] = {}

    def host(self) -> PluginManager:
        """A host of its own for each test, so that no test meets what another has built."""
        options = {self.plugin: dict(self.options)} if self.options else {}
        return PluginManager(PluginConfig(plugin_options=options))

    @property
    def kind(self) -> str:
        return self.plugin.partition(":")[0]

    @property
    def key(self) -> str:
        return self.plugin.partition(":")[2]

    @cached_property
    def entry(self) -> Entry:
        return self.host().choose(self.kind, self.key)


_EXAMINED: dict[tuple[str, type], list[Finding]] = {}


class PluginSuite(PluginTest):
    """Subclass it with ``plugin``; the name must begin with ``Test``."""

    def findings(self) -> list[Finding]:
        """What ``treadle doctor`` says of it; its import runs in a process of its own."""
        from treadle.testing.examination.checks import check

        entry = self.entry
        name = (repr(entry.unloaded(self.key)), type(self))
        if name not in _EXAMINED:
            plugins = self.host()
            same = [e for e in plugins.entries if (e.id, e.dist) == (entry.id, entry.dist)]
            checked, _ = check(plugins, same, seconds=30.0)
            _EXAMINED[name] = [finding for each in checked for finding in each.findings]
        return _EXAMINED[name]

    def output_text(self, *codes: str) -> list[str]:
        return [f"{f.code}: {f.text}" for f in self.findings() if f.code in codes]

    def test_it_is_found_and_loads(self) -> None:
        handled = {*LIGHT, *INSTALLED}
        wrong = [f"{f.code}: {f.text}" for f in self.findings() if f.code not in handled]
        assert wrong == []

    def test_its_import_is_light(self) -> None:
        assert self.output_text(*LIGHT) == [], "import what is heavy inside the hooks"

    def test_it_is_installed_as_it_says(self) -> None:
        assert self.output_text(*INSTALLED) == []

    def test_it_asks_for_a_range_of_the_core(self) -> None:
        """A plugin without an upper bound is installed beside a core that it does not know."""
        from packaging.requirements import Requirement

        entry = self.entry
        if entry.file is not None or normal(entry.dist) == "treadle-core":
            pytest.skip("it has no requirements")
        needs = [Requirement(text) for text in metadata.requires(entry.dist) or []]
        core = [need for need in needs if normal(need.name) == "treadle-core"]
        assert core, "its dependencies do not name treadle-core"
        signs = {part.operator for need in core for part in need.specifier}
        assert signs & {"<", "<=", "==", "~="}, f"{core[0]} has no upper bound"

    def test_it_leaves_the_keys_of_others_alone(self) -> None:
        """A hook looks at its key first, and answers ``None`` for one that is not its own."""
        kind = installed_kinds()[self.kind]
        if (
            kind.owner != "treadle-core"
            or kind.mode == "always"
            or kind.hook in ("treadle_attention_backend", "treadle_communicator")
        ):
            pytest.skip("its hook is not asked by key")
        if self.entry.key == "*":
            pytest.skip("it is the fallback: every key is its own")
        plugins = self.host()
        plugins.load(self.kind, self.key)
        relay = plugins.hooks_for(self.kind, self.key)
        found = getattr(relay, kind.hook)(**hook_arguments(kind.hook, plugins))
        assert not found, f"{kind.hook} answered {found!r} for {FOREIGN!r}"

    def test_its_annotations_agree_with_the_hooks(self) -> None:
        from treadle.api import hookspecs

        plugin = self.host().load(self.kind, self.key)
        for name, spec in inspect.getmembers(hookspecs.Plugin, inspect.isfunction):
            mine = getattr(plugin, name, None)
            if not name.startswith("treadle_") or not callable(mine):
                continue
            wanted = spec.__annotations__
            for argument, given in getattr(mine, "__annotations__", {}).items():
                if argument != "return" and argument in wanted:
                    said, want = _plain(given), _plain(wanted[argument])
                    assert said in ("Any", "object", want), (
                        f"{name}: {argument} is annotated {said}, the hook passes {want}"
                    )

    def test_its_options_are_documented(self) -> None:
        """``treadle plugin show`` and the help pages tell users what each option means."""
        from msgspec.json import schema

        from treadle.plugins.options import options_struct

        struct = options_struct(self.host().load(self.kind, self.key), self.kind, self.entry.key)
        if struct is None:
            return
        (described,) = (d for n, d in schema(struct)["$defs"].items() if n == struct.__name__)
        silent = [n for n, p in described["properties"].items() if not p.get("description")]
        assert silent == [], "give them msgspec.Meta(description=…)"


def hook_arguments(hook: str, plugins: PluginManager) -> dict[str, Any]:
    """Arguments for a hook whose key is foreign: it must not look at the others."""
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
        "role": ConnectorRole.WORKER,
        "layout": KVCacheLayout(16, 8, ()),
        "request": KernelRequest(cpu, "float32", {}) if hook == "treadle_kernel_op" else attention,
        "options": {},
    }
    names = [n for n in inspect.signature(getattr(Plugin, hook)).parameters if n != "self"]
    return {name: values.get(name, FOREIGN) for name in names}


def _plain(annotation: Any) -> str:
    """An annotation as text, without the modules of its names."""
    if annotation is None:
        return "None"
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    text = re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", text).strip("'\"").replace(" ", "")
    return text.replace("Mapping[str,Any]", "Options")
