"""The table of plugins, without importing any."""

from __future__ import annotations

import json
import sys

import pytest

from treadle.errors import PluginNotFoundError
from treadle.testing.examination.listing import rows


def notes(plugins):
    return {
        f"{row.distribution}/{row.kind}:{row.key}": (row.state, row.note) for row in rows(plugins)
    }


def test_standing_of_each_entry(site):
    site.scheme("acme-awq", "awq", "gptq", "fp8", "int8")
    site.scheme("other", "awq", "fp8")
    site.scheme("marlin", "gptq", override=True)
    plugins = site.plugin_manager(
        pin_plugin=["quantization:fp8=other"], disable_plugin=["quantization:int8"]
    )
    conflict = ("ready", "conflict: choose with --pin-plugin quantization:awq=DIST")
    assert notes(plugins) == {
        "acme-awq/quantization:awq": conflict,
        "other/quantization:awq": conflict,
        "acme-awq/quantization:fp8": ("ready", "replaced by other"),
        "other/quantization:fp8": ("ready", "pinned"),
        "acme-awq/quantization:gptq": ("ready", "replaced by marlin"),
        "marlin/quantization:gptq": ("ready", "override"),
        "acme-awq/quantization:int8": (
            "disabled",
            "disabled by --disable-plugin or TREADLE_DISABLED_PLUGINS",
        ),
    }
    assert not site.modules & set(sys.modules)


def test_requires_dist_is_evaluated(site):
    site.scheme("future", "a", requires="treadle-core>=99")
    site.scheme("other-platform", "b", requires='treadle-core>=99; sys_platform == "plan9"')
    rows_by_name = notes(site.plugin_manager())
    assert rows_by_name["future/quantization:a"][1].startswith(
        "requires treadle-core >=99, installed is "
    )
    assert rows_by_name["other-platform/quantization:b"] == ("ready", "")


def test_editable_is_told(site):
    site.scheme("acme", "awq")
    url = {"url": "file:///x", "dir_info": {"editable": True}}
    (site.folder / "acme-1.0.dist-info" / "direct_url.json").write_text(json.dumps(url))
    assert notes(site.plugin_manager())["acme/quantization:awq"] == ("ready", "editable")


def test_by_kind(site):
    site.scheme("acme", "awq")
    site.install("pol", {"treadle.scheduling_policies": {"p": "pol"}}, "")
    assert [row.key for row in rows(site.plugin_manager(), "scheduling_policies")] == ["p"]
    with pytest.raises(PluginNotFoundError, match="no plugin kind 'policy'"):
        list(rows(site.plugin_manager(), "policy"))
