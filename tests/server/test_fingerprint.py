"""The fingerprint of a system changes with every plugin's version, and with nothing else."""

from __future__ import annotations

from treadle.api.kinds import QUANTIZATION
from treadle_server.fingerprint import fingerprint


def test_it_changes_with_the_version_of_any_plugin(site):
    site.scheme("acme-awq", "awq")
    site.scheme("acme-fp8", "fp8")
    before = fingerprint(site.plugin_manager(), {"model": "m"})
    assert fingerprint(site.plugin_manager(), {"model": "m"}) == before
    for name, other in (("acme_awq", "acme_fp8"), ("acme_fp8", "acme_awq")):
        info = site.folder / f"{name}-1.0.dist-info"
        text = (info / "METADATA").read_text()
        (info / "METADATA").write_text(text.replace("Version: 1.0", "Version: 1.1"))
        assert fingerprint(site.plugin_manager(), {"model": "m"}) != before, other
        (info / "METADATA").write_text(text)
    assert fingerprint(site.plugin_manager(), {"model": "m"}) == before


def test_it_changes_with_what_is_in_use_and_with_the_model(site):
    site.scheme("acme-awq", "awq")
    before = fingerprint(site.plugin_manager(), {"a": 1, "b": 2})
    assert fingerprint(site.plugin_manager(), {"b": 2, "a": 1}) == before, "the order says nothing"
    assert fingerprint(site.plugin_manager(), {"a": 1, "b": 3}) != before
    assert fingerprint(site.plugin_manager(disable_plugin=["acme-awq"]), {"a": 1, "b": 2}) != before


def test_loading_a_plugin_does_not_change_it(site):
    site.scheme("acme-awq", "awq")
    plugins = site.plugin_manager()
    before = fingerprint(plugins)
    plugins.create(QUANTIZATION, "awq", checkpoint={}, device=None)
    assert fingerprint(plugins) == before
