"""Disabling, the allow-list, autoload and strict mode, from flags and from the environment."""

from __future__ import annotations

import pytest

from treadle.api.kinds import QUANTIZATION
from treadle.errors import PluginLoadError, PluginNotFoundError
from treadle.plugins import PluginManager
from treadle.plugins.entries import Entry
from treadle.plugins.switches import Switches


def states(plugins):
    return {f"{e.dist}/{e.key}": e.state for e in plugins.entries}


@pytest.fixture
def two(site):
    site.scheme("acme-awq", "awq", "gptq")
    site.scheme("other-fp8", "fp8")
    return site


def test_disable_a_distribution_in_any_spelling(two):
    state_by_key = states(two.plugin_manager(disable_plugin=["Acme_AWQ"]))
    assert state_by_key == {
        "acme-awq/awq": "disabled",
        "acme-awq/gptq": "disabled",
        "other-fp8/fp8": "ready",
    }


def test_disable_one_key(two):
    state_by_key = states(two.plugin_manager(disable_plugin=["quantization:gptq"]))
    assert state_by_key == {
        "acme-awq/awq": "ready",
        "acme-awq/gptq": "disabled",
        "other-fp8/fp8": "ready",
    }


def test_disable_by_environment(two, monkeypatch):
    monkeypatch.setenv("TREADLE_DISABLED_PLUGINS", "other-fp8, quantization:awq")
    state_by_key = states(two.plugin_manager())
    assert state_by_key == {
        "acme-awq/awq": "disabled",
        "acme-awq/gptq": "ready",
        "other-fp8/fp8": "disabled",
    }
    with pytest.raises(
        PluginNotFoundError, match=r"other-fp8 1\.0 is disabled: disabled by --disable-plugin"
    ):
        two.plugin_manager().create(QUANTIZATION, "fp8", checkpoint={}, device=None)


def test_disabling_something_unknown_is_told(two, caplog):
    two.plugin_manager(disable_plugin=["acme-awk"])
    assert "--disable-plugin acme-awk: nothing of that name is installed" in caplog.text


def test_allow_list(two, monkeypatch):
    monkeypatch.setenv("TREADLE_PLUGINS", "other-fp8,quantization:gptq")
    state_by_key = states(two.plugin_manager())
    assert state_by_key == {
        "acme-awq/awq": "disabled",
        "acme-awq/gptq": "ready",
        "other-fp8/fp8": "ready",
    }


@pytest.mark.parametrize("kind", ["model_sources", "load_formats", "tokenizers", "renderers"])
def test_an_allow_list_leaves_what_every_model_needs(monkeypatch, kind):
    monkeypatch.setenv("TREADLE_PLUGINS", "nothing")
    basic = {"hf", "safetensors", "pt", "dummy", "auto", "jinja", "file"}
    usable_keys = {e.key for e in PluginManager().entries if e.kind == kind and e.usable}
    assert usable_keys and usable_keys <= basic


def test_allow_list_and_autoload_leave_the_core(monkeypatch):
    monkeypatch.setenv("TREADLE_PLUGINS", "nothing")
    monkeypatch.setenv("TREADLE_PLUGIN_AUTOLOAD", "0")
    from treadle.config import PluginConfig

    core = Entry(
        "scheduling_policies", "fcfs", "treadle.scheduler.policies", "treadle-core", "0.1.0"
    )
    third = Entry("scheduling_policies", "x", "x", "third-party", "1")
    Switches.read(PluginConfig()).apply([core, third])
    assert (core.state, third.state) == ("ready", "disabled")


def test_autoload_off_ignores_third_parties(two, monkeypatch):
    monkeypatch.setenv("TREADLE_PLUGIN_AUTOLOAD", "0")
    monkeypatch.setattr("treadle.plugins.switches.DISTRIBUTIONS", frozenset({"other-fp8"}))
    state_by_key = states(two.plugin_manager())
    assert state_by_key == {
        "acme-awq/awq": "disabled",
        "acme-awq/gptq": "disabled",
        "other-fp8/fp8": "ready",
    }


@pytest.mark.parametrize("setting", ["flag", "environment"])
def test_strict_makes_any_broken_plugin_fatal(two, monkeypatch, setting):
    two.scheme("broken-x", "x", code="import missing_kernel")
    two.scheme("broken-y", "y", code="1 / 0")
    assert two.plugin_manager().create(QUANTIZATION, "fp8", checkpoint={}, device=None)
    if setting == "environment":
        monkeypatch.setenv("TREADLE_PLUGIN_STRICT", "1")
    plugins = two.plugin_manager(plugin_strict=setting == "flag")
    with pytest.raises(PluginLoadError) as error:
        plugins.create(QUANTIZATION, "fp8", checkpoint={}, device=None)
    assert "missing_kernel" in str(error.value) and "division by zero" in str(error.value)


def test_strict_allows_what_works(two):
    assert (
        two.plugin_manager(plugin_strict=True)
        .create(QUANTIZATION, "fp8", checkpoint={}, device=None)
        .name
        == "other-fp8"
    )
