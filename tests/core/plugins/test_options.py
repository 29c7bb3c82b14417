"""The options of a plugin are checked by its own Struct."""

from __future__ import annotations

import pytest

from treadle.api.kinds import LOGITS_PROCESSORS, QUANTIZATION, STAT_LOGGERS
from treadle.config import from_options
from treadle.errors import ConfigError, PluginLoadError
from treadle.text.assets import open_plugins

STRUCT = """
    from typing import Annotated
    import msgspec

    class Options(msgspec.Struct, frozen=True):
        bits: Annotated[int, msgspec.Meta(ge=2, le=8)] = 4
        names: list[str] = []

    TREADLE_OPTIONS = {key: Options}
"""


@pytest.fixture
def typed(site):
    site.scheme("acme-awq", "awq", "gptq", extra=STRUCT.replace("key:", "'quantization:awq':"))
    return site


def options(site, method="awq", **values):
    plugins = site.plugin_manager(
        plugin_options={f"quantization:{method}": values} if values else {}
    )
    return plugins.create(QUANTIZATION, method, checkpoint={}, device=None).options


def test_defaults_are_filled_in(typed):
    assert options(typed) == {"bits": 4, "names": []}


def test_values_are_converted(typed):
    assert options(typed, bits="3", names=["a"]) == {"bits": 3, "names": ["a"]}


def test_a_bad_value_carries_its_path(typed):
    with pytest.raises(ConfigError) as error:
        options(typed, bits=16)
    assert str(error.value) == "option --plugin.quantization.awq.bits is 16: Expected `int` <= 8"
    with pytest.raises(ConfigError, match=r"--plugin\.quantization\.awq\.names\[1\] is \['a', 2\]"):
        options(typed, names=["a", 2])


def test_an_unknown_option_lists_the_known(typed):
    with pytest.raises(
        ConfigError, match="quantization:awq has no option 'bit'; its options: bits, names"
    ):
        options(typed, bit=3)


def test_a_key_without_a_struct_gets_what_was_written(typed):
    assert options(typed, "gptq") == {}
    assert options(typed, "gptq", anything=[1]) == {"anything": [1]}


def test_a_struct_for_all_keys_and_options_for_the_fallback(site):
    site.scheme("any-quant", "*", extra=STRUCT.replace("key:", "'quantization:*':"))
    assert options(site, "odd", bits=8) == {"bits": 8, "names": []}
    plugins = site.plugin_manager(plugin_options={"quantization:*": {"bits": 2}})
    assert plugins.create(QUANTIZATION, "odd", checkpoint={}, device=None).options["bits"] == 2


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("quantization:awk", r"no plugin provides quantization:awk \(known: awq, gptq\)"),
        ("quantisation:awq", "write kind:key"),
        ("awq", "write kind:key"),
    ],
)
def test_options_for_nobody_are_refused(typed, name, reason):
    with pytest.raises(ConfigError, match=reason):
        typed.plugin_manager(plugin_options={name: {"bits": 3}})


@pytest.mark.parametrize("value", ["[1]", "{'quantization:awq': dict}"])
def test_a_wrong_declaration_is_a_broken_plugin(site, value):
    site.scheme("acme-awq", "awq", extra=f"TREADLE_OPTIONS = {value}")
    with pytest.raises(PluginLoadError, match="TREADLE_OPTIONS"):
        site.plugin_manager().create(QUANTIZATION, "awq", checkpoint={}, device=None)


def test_many_plugins_get_their_own_options_in_list_order(site):
    code = """
        from treadle.api import impl

        @impl
        def treadle_logits_processor(name, vocab_size, options):
            return (name, vocab_size, dict(options))

        @impl
        def treadle_stat_logger(name):
            return name
    """
    groups = {
        "treadle.logits_processors": {"a": "procs", "b": "procs"},
        "treadle.stat_loggers": {"s": "procs"},
    }
    site.install("procs", groups, code)
    plugins = site.plugin_manager(plugin_options={"logits_processors:a": {"x": 1}})
    assert [plugins.create(LOGITS_PROCESSORS, name, vocab_size=7) for name in ["b", "a"]] == [
        ("b", 7, {}),
        ("a", 7, {"x": 1}),
    ]
    assert (
        [plugins.create(STAT_LOGGERS, "s")],
        [plugins.create(STAT_LOGGERS, name) for name in []],
    ) == (
        ["s"],
        [],
    )


@pytest.mark.parametrize("key", ["renderers:jinja", "renderers:demo"])
def test_wrong_options_stop_the_start_whether_the_plugin_is_used_or_not(key, tmp_path):
    """Before a model is read: there is none."""
    (tmp_path / "demo.py").write_text(RENDERER)
    options = {key: {"chat_templat": "x"}}
    config = from_options(
        model="nowhere", plugin_file=[str(tmp_path / "demo.py")], plugin_options=options
    )
    with pytest.raises(ConfigError, match="did you mean 'chat_template'"):
        open_plugins(config)


RENDERER = """
import msgspec
from treadle.api import impl

TREADLE = {"renderers": ["demo"]}

class Options(msgspec.Struct, frozen=True):
    chat_template: str = ""

TREADLE_OPTIONS = {"renderers:demo": Options}

@impl
def treadle_renderer(mode):
    return None
"""
