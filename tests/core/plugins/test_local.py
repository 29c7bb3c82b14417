"""One Python file as a plugin."""

from __future__ import annotations

import sys

import pytest

from treadle.api.kinds import QUANTIZATION, SCHEDULING_POLICIES
from treadle.errors import ConfigError, PluginLoadError

CODE = """
import msgspec
from treadle.api import impl

TREADLE: dict[str, list[str]] = {"scheduling_policies": ["mine", "fcfs"]}


class Options(msgspec.Struct, frozen=True):
    depth: int = 2


TREADLE_OPTIONS = {"scheduling_policies:mine": Options}


@impl
def treadle_scheduling_policy(name, options):
    return name, dict(options)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_policy.py"
    path.write_text(CODE)
    return path


def test_a_file_serves_the_keys_it_declares(site, file):
    plugins = site.plugin_manager(
        plugin_file=[str(file)], plugin_options={"scheduling_policies:mine": {"depth": "5"}}
    )
    assert not any(m.startswith("treadle_local_") for m in sys.modules), "declaring runs nothing"
    assert plugins.create(SCHEDULING_POLICIES, "mine") == ("mine", {"depth": 5})


def test_a_file_replaces_an_installed_key(site, file):
    site.install("acme", {"treadle.scheduling_policies": {"fcfs": "acme"}}, "")
    assert site.plugin_manager(plugin_file=[str(file)]).create(SCHEDULING_POLICIES, "fcfs") == (
        "fcfs",
        {},
    )


def test_a_file_without_a_declaration_is_an_extension(site, file):
    site.scheme("acme-awq", "awq")
    file.write_text(
        "from treadle.api import impl\n@impl(wrapper=True)\ndef treadle_quantization(method):\n"
        "    found = yield\n    found.name += '!'\n    return found\n"
    )
    assert (
        site.plugin_manager(plugin_file=[str(file)])
        .create(QUANTIZATION, "awq", checkpoint={}, device=None)
        .name
        == "acme-awq!"
    )


def test_a_file_that_fails_is_broken_and_leaves_no_module(site, file):
    file.write_text("TREADLE = {'scheduling_policies': ['mine']}\nimport missing_kernel\n")
    plugins = site.plugin_manager(plugin_file=[str(file)])
    with pytest.raises(
        PluginLoadError, match=r"scheduling_policies:mine from my_policy\.py .*missing_kernel"
    ):
        plugins.create(SCHEDULING_POLICIES, "mine")
    assert not any(m.startswith("treadle_local_") for m in sys.modules)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("def broken(:\n", "is not Python"),
        ("TREADLE = {k: [] for k in 'ab'}\n", "not computed"),
        ("TREADLE = ['scheduling_policies']\n", "must be a literal"),
        (
            "TREADLE = {'policy': ['x']}\n",
            "there is no kind 'policy'; known kinds: .*scheduling_policies",
        ),
        (
            "TREADLE = {'scheduling_policies': 'x'}\n",
            "must be a literal.*policies|must be a literal.*str",
        ),
    ],
)
def test_a_wrong_file_is_refused_at_once(site, file, text, reason):
    file.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        site.plugin_manager(plugin_file=[str(file)])


def test_a_missing_file(site, tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        site.plugin_manager(plugin_file=[str(tmp_path / "nobody.py")])
