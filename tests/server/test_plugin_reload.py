"""Another plugin manager with new code, and everything as it was where the new code cannot be used."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from treadle.api.kinds import QUANTIZATION, SCHEDULING_POLICIES, TOOL_PARSERS
from treadle.errors import (
    ConfigError,
    PluginConflictError,
    PluginError,
    PluginLoadError,
    PluginNotFoundError,
    PluginReloadError,
)
from treadle_server.plugin_reload import reloaded_plugins

PARSER = """
from treadle.api import impl

@impl
def treadle_tool_parser(name):
    from {module} import helper
    return helper.SAYS
"""
BOTH = (
    PARSER
    + """
@impl
def treadle_scheduling_policy(name):
    return object()
"""
)


class Package:
    """A distribution with one tool parser, in a package of two modules."""

    def __init__(self, site: Any, name: str = "acme") -> None:
        self.site, self.name = site, name
        self.folder: Path = site.folder / name
        self.write_code("old")
        site.install(name, {"treadle.tool_parsers": {"mine": name}}, "")
        (site.folder / f"{name}.py").unlink()
        site.modules.add(f"{name}.helper")

    def write_code(self, text: str, code: str = PARSER) -> None:
        # Other caches than those of files that are as long and were written in the same second.
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        (self.folder / "__init__.py").write_text(code.format(module=self.name))
        (self.folder / "helper.py").write_text(f"SAYS = {text!r}\n")

    def install_version(
        self, version: str, groups: dict[str, dict[str, str]] | None = None
    ) -> None:
        """What pip does when it replaces a version."""
        for info in self.site.folder.glob(f"{self.name}-*.dist-info"):
            shutil.rmtree(info)
        entry_points = groups or {"treadle.tool_parsers": {"mine": self.name}}
        self.site.install(self.name, entry_points, "", version=version)
        (self.site.folder / f"{self.name}.py").unlink()


@pytest.fixture
def acme(site):
    return Package(site)


def parser_text(plugins) -> Any:
    return plugins.create(TOOL_PARSERS, "mine", tokenizer=None, tools=())


def test_new_code_is_used_by_the_new_host_and_by_nobody_else(acme, site):
    site.scheme("bystander", "x")
    plugins = site.plugin_manager()
    assert parser_text(plugins) == "old"
    plugins.create(QUANTIZATION, "x", checkpoint={}, device=None)
    acme.write_code("new and longer")
    acme.install_version("2.0")
    with reloaded_plugins(plugins, "tool_parsers:mine") as (fresh, reload):
        assert parser_text(fresh) == "new and longer"
    assert (reload.previous_version, reload.version, reload.plugins) == (
        "1.0",
        "2.0",
        ["tool_parsers:mine"],
    )
    assert plugins.choose("tool_parsers", "mine").version == "1.0"
    assert fresh.choose("tool_parsers", "mine").version == "2.0"
    assert fresh.choose("tool_parsers", "mine").state == "loaded"
    assert fresh.load("quantization", "x") is plugins.load("quantization", "x")
    assert fresh.call_stats is plugins.call_stats
    acme.write_code("newest of all")
    with reloaded_plugins(fresh, "tool_parsers:mine") as (third, _):
        assert parser_text(third) == "newest of all"


def exchange(plugins, id: str, **options: Any) -> None:
    with reloaded_plugins(plugins, id, **options):
        pass


BAD: dict[str, tuple[str, str]] = {
    "syntax": ("def (", "import: SyntaxError"),
    "import": ("1 / 0", "import: ZeroDivisionError"),
    "missing": ("import surely_not_installed", "dependency: .*surely_not_installed"),
    "signature": (PARSER.replace("(name)", "(nme)"), "signature: .*nme"),
    "hook": (
        PARSER.replace("tool_parser(name)", "scheduling_policy(name)"),
        "hook: .*treadle_tool_parser",
    ),
    "crash": ("import os; os.abort()", "crash: .*SIGABRT"),
    "hang": ("import time; time.sleep(60)", "hang: .*no end"),
}


@pytest.mark.parametrize("case", BAD)
def test_broken_code_is_diagnosed_and_the_old_stays(case, acme, site):
    plugins = site.plugin_manager()
    assert parser_text(plugins) == "old"
    modules = {m: sys.modules[m] for m in ("acme", "acme.helper")}
    code, words = BAD[case]
    acme.write_code("broken", code)
    seconds = 1.5 if case == "hang" else 30.0
    with pytest.raises(PluginLoadError, match=f"(?s)acme 1.0 stays.*{words}"):
        exchange(plugins, "tool_parsers:mine", seconds=seconds)
    assert parser_text(plugins) == "old"
    assert {m: sys.modules[m] for m in modules} == modules


def test_what_fails_in_use_is_undone(acme, site):
    plugins = site.plugin_manager()
    assert parser_text(plugins) == "old"
    module = sys.modules["acme"]
    acme.write_code("unusable")
    with (
        pytest.raises(ValueError, match="unusable"),
        reloaded_plugins(plugins, "tool_parsers:mine") as (new, _),
    ):
        raise ValueError(parser_text(new))
    assert sys.modules["acme"] is module
    assert parser_text(plugins) == "old", "imported inside of the hook"


def test_a_broken_plugin_can_be_repaired(acme, site):
    acme.write_code("", "1 / 0")
    plugins = site.plugin_manager()
    with pytest.raises(PluginLoadError):
        parser_text(plugins)
    acme.write_code("repaired")
    with reloaded_plugins(plugins, "tool_parsers:mine") as (fresh, _):
        assert parser_text(fresh) == "repaired"


REFUSED: dict[str, tuple[type[PluginError], str]] = {
    "tool_parsers:nobody": (PluginNotFoundError, "known: "),
    "nonsense:mine": (PluginNotFoundError, "no plugin kind 'nonsense'"),
    "nonsense": (PluginNotFoundError, "no plugin kind 'nonsense'"),
    "quantization:x": (
        PluginReloadError,
        "restart the server .reloadable: reasoning_parsers, server",
    ),
    "tool_parsers:twice": (PluginConflictError, "--pin-plugin tool_parsers:twice=DIST"),
}


@pytest.mark.parametrize("id", REFUSED)
def test_what_is_refused(id, acme, site):
    site.scheme("bystander", "x")
    for name in ("one", "two"):
        site.install(name, {"treadle.tool_parsers": {"twice": name}})
    error, words = REFUSED[id]
    with pytest.raises(error, match=words):
        exchange(site.plugin_manager(), id)


def test_the_parts_of_treadle_itself_are_refused():
    from treadle.plugins import PluginManager

    with pytest.raises(
        PluginReloadError, match="server:tokenize of treadle-server is code of treadle"
    ):
        exchange(PluginManager(), "server:tokenize")


def test_an_entry_of_others_may_not_have_treadle_imported_again(acme, site):
    plugins = site.plugin_manager()
    acme.install_version("2.0", {"treadle.tool_parsers": {"mine": "treadle.api.parsers"}})
    with pytest.raises(
        PluginReloadError, match="tool_parsers:mine of acme is code of treadle itself"
    ):
        exchange(plugins, "tool_parsers:mine")


@pytest.mark.parametrize("usage", ["here", "in another process", "nowhere"])
def test_versions_are_not_mixed(usage, acme, site):
    groups = {
        "treadle.tool_parsers": {"mine": "acme"},
        "treadle.scheduling_policies": {"order": "acme"},
    }
    acme.install_version("1.0", groups)
    acme.write_code("old", BOTH)
    plugins = site.plugin_manager()
    assert parser_text(plugins) == "old"
    if usage == "here":
        plugins.create(SCHEDULING_POLICIES, "order")
    used = {"scheduling_policies:order"} if usage == "in another process" else set()
    if usage == "nowhere":
        with reloaded_plugins(plugins, "tool_parsers:mine", in_use=used) as (fresh, _):
            assert parser_text(fresh) == "old"
        return
    with (
        pytest.raises(
            PluginReloadError, match="acme also provides scheduling_policies:order, which is in use"
        ),
        reloaded_plugins(plugins, "tool_parsers:mine", in_use=used),
    ):
        pass


def test_the_key_may_be_gone_or_of_another_generation(acme, site):
    plugins = site.plugin_manager()
    acme.install_version("2.0", {"treadle.tool_parsers": {"other": "acme"}})
    with pytest.raises(PluginLoadError, match=r"not declared by acme any more; acme 1\.0 stays"):
        exchange(plugins, "tool_parsers:mine")
    acme.install_version("3.0", {"treadle.tool_parsers.v2": {"mine": "acme"}})
    with pytest.raises(PluginLoadError, match="generation: speaks tool_parsers v2, this treadle"):
        exchange(plugins, "tool_parsers:mine")


def test_a_lock_holds(acme, site, tmp_path):
    import msgspec

    file = tmp_path / "treadle.lock"
    file.write_bytes(msgspec.json.encode(site.plugin_manager().lock()))
    plugins = site.plugin_manager(plugin_lock_file=str(file))
    acme.write_code("edited, same version")
    with reloaded_plugins(plugins, "tool_parsers:mine") as (fresh, _):
        assert parser_text(fresh) == "edited, same version"
    acme.install_version("2.0")
    with pytest.raises(PluginConflictError, match=r"- .*acme 1\.0\n  \+ .*acme 2\.0"):
        exchange(plugins, "tool_parsers:mine")


def test_a_namespace_package_is_shared_with_others(site):
    folder = site.folder / "house"
    for name, text in (("ours", "old"), ("theirs", "same")):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(PARSER.format(module=f"house.{name}"))
        (folder / name / "helper.py").write_text(f"SAYS = {text!r}\n")
        site.modules |= {"house", f"house.{name}", f"house.{name}.helper"}
    for name, key in (("ours", "mine"), ("theirs", "other")):
        site.install(f"house-{name}", {"treadle.tool_parsers": {key: f"house.{name}"}}, "")
    plugins = site.plugin_manager()
    assert (
        parser_text(plugins),
        plugins.create(TOOL_PARSERS, "other", tokenizer=None, tools=()),
    ) == (
        "old",
        "same",
    )
    reloaded_module, other_module = sys.modules["house.ours"], sys.modules["house.theirs"]
    with pytest.raises(KeyError), reloaded_plugins(plugins, "tool_parsers:mine"):
        assert sys.modules["house.ours"] is not reloaded_module
        assert sys.modules["house.theirs"] is other_module
        raise KeyError
    assert sys.modules["house"].ours is sys.modules["house.ours"] is reloaded_module


def test_a_local_file_is_read_again(site, tmp_path):
    file = tmp_path / "mine.py"
    source = 'from treadle.api import impl\nTREADLE = {"tool_parsers": ["mine"]}\n'
    source += "@impl\ndef treadle_tool_parser(name):\n    return "
    file.write_text(source + "'old'\n")
    plugins = site.plugin_manager(plugin_file=[str(file)])
    assert parser_text(plugins) == "old"
    file.write_text(source + "'new'\n")
    with reloaded_plugins(plugins, "tool_parsers:mine") as (fresh, reload):
        assert (parser_text(fresh), parser_text(plugins)) == ("new", "old")
    assert reload.version != reload.previous_version
    file.write_text("def (")
    with pytest.raises(ConfigError, match="is not Python"):
        exchange(fresh, "tool_parsers:mine")
