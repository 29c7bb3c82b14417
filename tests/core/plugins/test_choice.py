"""Who serves a key, and the errors when nobody or too many do."""

from __future__ import annotations

import pytest

from treadle.api.kinds import MODELS, QUANTIZATION
from treadle.errors import ConfigError, PluginConflictError, PluginLoadError, PluginNotFoundError
from treadle.known_plugins import DISTRIBUTION_OF_KEY
from treadle.plugins import Entry, PluginManager

FOREIGN = """
    from treadle.api import impl

    @impl
    def treadle_quantization(method):
        return None
"""


def name(plugins: PluginManager, method: str = "awq") -> str:
    return plugins.create(QUANTIZATION, method, checkpoint={}, device=None).name


def test_plain(site):
    site.scheme("acme-awq", "awq")
    assert name(site.plugin_manager()) == "acme-awq"


def test_conflict_names_both_and_the_flag(site):
    site.scheme("acme-awq", "awq")
    site.scheme("other-awq", "awq")
    with pytest.raises(PluginConflictError) as error:
        name(site.plugin_manager())
    assert str(error.value) == (
        "quantization:awq is provided by acme-awq 1.0, other-awq 1.0; "
        "choose one with --pin-plugin quantization:awq=DIST"
    )


def test_a_conflict_does_not_touch_other_keys(site):
    site.scheme("acme-awq", "awq", "gptq")
    site.scheme("other-awq", "awq")
    assert name(site.plugin_manager(), "gptq") == "acme-awq"


def test_override_beats_plain_and_pin_beats_override(site):
    site.scheme("acme-awq", "awq")
    site.scheme("marlin-awq", "awq", override=True)
    assert name(site.plugin_manager()) == "marlin-awq"
    assert name(site.plugin_manager(pin_plugin=["quantization:awq=acme_AWQ"])) == "acme-awq"


def test_two_overrides_conflict(site):
    site.scheme("one", "awq", override=True)
    site.scheme("two", "awq", override=True)
    with pytest.raises(PluginConflictError, match=r"one 1\.0, two 1\.0"):
        name(site.plugin_manager())


def test_pin_to_somebody_who_does_not_provide_it(site):
    site.scheme("acme-awq", "awq")
    with pytest.raises(PluginNotFoundError, match=r"pinned to nobody-awq.*provided by: acme-awq"):
        name(site.plugin_manager(pin_plugin=["quantization:awq=nobody-awq"]))


def test_pin_to_a_disabled_one(site):
    site.scheme("acme-awq", "awq")
    plugins = site.plugin_manager(
        pin_plugin=["quantization:awq=acme-awq"], disable_plugin=["acme-awq"]
    )
    with pytest.raises(PluginNotFoundError, match="pinned to acme-awq, which is disabled"):
        name(plugins)


@pytest.mark.parametrize(
    "pin", ["awq=x", "quantization:awq", "quantization:=x", "quantisation:awq=x"]
)
def test_a_malformed_pin_is_refused_at_once(site, pin):
    with pytest.raises(ConfigError, match="--pin-plugin is"):
        site.plugin_manager(pin_plugin=[pin])


def test_the_fallback_serves_what_nobody_declares(site):
    site.scheme("any-quant", "*")
    site.scheme("acme-awq", "awq")
    plugins = site.plugin_manager()
    assert (name(plugins, "awq"), name(plugins, "odd")) == ("acme-awq", "any-quant")
    assert plugins.create(QUANTIZATION, "odd", checkpoint={}, device=None).method == "odd"
    assert plugins.keys("quantization") == ["awq"]


def test_the_fallback_can_be_pinned_for_one_key(site):
    site.scheme("any-quant", "*")
    site.scheme("acme-awq", "awq", "gptq")
    plugins = site.plugin_manager(pin_plugin=["quantization:awq=any-quant"])
    assert (name(plugins, "awq"), name(plugins, "gptq")) == ("any-quant", "acme-awq")


def test_disabling_the_owner_leaves_the_fallback(site):
    site.scheme("any-quant", "*")
    site.scheme("acme-awq", "awq")
    assert name(site.plugin_manager(disable_plugin=["quantization:awq"])) == "any-quant"


def test_missing_key_lists_the_known_ones_and_names_what_to_install(site, monkeypatch):
    site.scheme("acme-awq", "awq", "gptq")
    monkeypatch.setattr(
        "treadle.plugins.registry.DISTRIBUTION_OF_KEY",
        {**DISTRIBUTION_OF_KEY, "quantization:gguf": "treadle-fp8"},
    )
    with pytest.raises(PluginNotFoundError) as error:
        name(site.plugin_manager(), "gguf")
    assert str(error.value) == (
        "no plugin provides quantization:gguf (known: awq, gptq); "
        "from a clone: pip install './kits/layers' './kits/triton' './kits/fp8' './plugins/quantization/fp8'"
    )


def test_missing_key_among_many_shows_the_nearest():
    entries = [Entry("models", f"Arch{i}ForCausalLM", "m", "d", "1") for i in range(60)]
    plugins = PluginManager(source=lambda: entries)
    with pytest.raises(PluginNotFoundError, match=r"Arch5ForCausalLM.* and 55 more"):
        plugins.create(MODELS, "Arch5ForCausalLN", hf_config=None)


def test_missing_key_explains_why_its_owner_is_out(site):
    site.install("next-awq", {"treadle.quantization.v2": {"awq": "next_awq"}})
    with pytest.raises(
        PluginNotFoundError, match=r"next-awq 1\.0 is incompatible: speaks quantization v2"
    ):
        name(site.plugin_manager())


def test_unknown_kind():
    with pytest.raises(
        PluginNotFoundError, match=r"no plugin kind 'quantisation'; known kinds: .*quantization"
    ):
        PluginManager(source=list).hooks_for("quantisation", "awq")


def test_a_declared_key_must_be_answered(site):
    site.scheme("liar", "awq", code=FOREIGN)
    with pytest.raises(
        PluginLoadError,
        match=r"quantization:awq is declared by liar 1\.0, but its treadle_quantization returned None",
    ):
        name(site.plugin_manager())


def test_a_fallback_may_decline(site):
    site.scheme("any-quant", "*", code=FOREIGN)
    with pytest.raises(
        PluginNotFoundError,
        match=r"no plugin provides quantization:odd.*fallback of any-quant 1\.0 cannot",
    ):
        name(site.plugin_manager(), "odd")


def test_a_module_with_two_keys_does_not_answer_for_a_key_given_to_another(site):
    """The trap: loaded for gptq, it would be asked first for awq too."""
    site.scheme("mod-a", "awq", "gptq")
    site.scheme("mod-b", "awq", "gptq")
    plugins = site.plugin_manager(pin_plugin=["quantization:awq=mod-a", "quantization:gptq=mod-b"])
    assert [name(plugins, m) for m in ("awq", "gptq", "awq", "gptq")] == ["mod-a", "mod-b"] * 2


def test_two_hosts_choose_independently(site):
    site.scheme("mod-a", "awq")
    site.scheme("mod-b", "awq")
    first, second = (
        site.plugin_manager(pin_plugin=[f"quantization:awq={d}"]) for d in ("mod-a", "mod-b")
    )
    assert [name(first), name(second), name(first)] == ["mod-a", "mod-b", "mod-a"]
