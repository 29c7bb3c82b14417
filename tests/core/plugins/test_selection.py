"""A worker gets the parent's choices and refuses where its installation differs."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from treadle.api.kinds import QUANTIZATION, SCHEDULING_POLICIES
from treadle.config import PluginConfig
from treadle.errors import PluginConflictError, PluginLoadError
from treadle.plugins import PluginManager, PluginSelection


def sent(plan: PluginSelection) -> PluginSelection:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=PluginSelection)


def test_the_plan_holds_what_was_chosen(site):
    site.scheme("acme-awq", "awq", "gptq")
    site.scheme("other-awq", "awq")
    site.scheme("marlin", "gptq", override=True)
    plan = site.plugin_manager(pin_plugin=["quantization:awq=other-awq"]).selection()
    assert [(c.key, c.dist, c.target, c.version) for c in plan.choices] == [
        ("awq", "other-awq", "other_awq", "1.0"),
        ("gptq", "marlin", "marlin", "1.0"),
    ]


def test_a_worker_follows_the_plan_and_not_its_environment(site, monkeypatch):
    site.scheme("acme-awq", "awq")
    site.scheme("other-awq", "awq")
    config = PluginConfig(
        pin_plugin=["quantization:awq=other-awq"], plugin_options={"quantization:awq": {"x": 1}}
    )
    plan = sent(PluginManager(config, source=site.scan).selection())
    monkeypatch.setenv("TREADLE_DISABLED_PLUGINS", "other-awq")
    scheme = PluginManager.from_selection(plan, config, source=site.scan).create(
        QUANTIZATION, "awq", checkpoint={}, device=None
    )
    assert (scheme.name, scheme.options) == ("other-awq", {"x": 1})


def test_a_fallback_pinned_for_a_key_stays_so(site):
    site.scheme("any-quant", "*")
    site.scheme("acme-awq", "awq")
    plan = sent(site.plugin_manager(pin_plugin=["quantization:awq=any-quant"]).selection())
    assert (
        PluginManager.from_selection(plan, source=site.scan)
        .create(QUANTIZATION, "awq", checkpoint={}, device=None)
        .name
        == "any-quant"
    )


def test_a_worker_meets_the_same_conflict(site):
    site.scheme("acme-awq", "awq")
    site.scheme("other-awq", "awq")
    plugins = PluginManager.from_selection(
        sent(site.plugin_manager().selection()), source=site.scan
    )
    with pytest.raises(PluginConflictError, match=r"acme-awq 1\.0, other-awq 1\.0"):
        plugins.create(QUANTIZATION, "awq", checkpoint={}, device=None)


@pytest.mark.parametrize(
    ("version", "reason"), [("2.0", "this worker has 2.0"), (None, "this worker has none")]
)
def test_a_difference_of_installations_is_refused_for_that_key_only(site, version, reason):
    site.scheme("acme-awq", "awq")
    site.scheme("same-fp8", "fp8")
    plan = sent(site.plugin_manager().selection())

    def elsewhere():
        for entry in site.scan():
            if entry.dist == "acme-awq":
                entry.version = version
            if entry.version:
                yield entry

    plugins = PluginManager.from_selection(plan, source=elsewhere)
    assert plugins.create(QUANTIZATION, "fp8", checkpoint={}, device=None).name == "same-fp8"
    with pytest.raises(PluginLoadError, match=f"the parent has acme-awq 1.0, {reason}"):
        plugins.create(QUANTIZATION, "awq", checkpoint={}, device=None)


def test_a_real_worker_process(site):
    site.scheme("acme-awq", "awq")
    plan = msgspec.msgpack.encode(site.plugin_manager().selection()).hex()
    code = (
        "import sys, msgspec; from treadle.api.kinds import QUANTIZATION; from treadle.plugins import PluginManager, PluginSelection; "
        "plan = msgspec.msgpack.decode(bytes.fromhex(sys.argv[1]), type=PluginSelection); "
        "print(PluginManager.from_selection(plan).create(QUANTIZATION, 'awq', checkpoint={}, device=None).name)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, plan],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(site.folder)},
    )
    assert out.stdout.strip() == "acme-awq"


def test_local_files_travel_by_path_and_content(site, tmp_path):
    file = tmp_path / "mine.py"
    code = "from treadle.api import impl\nTREADLE = {'scheduling_policies': ['p']}\n@impl\ndef treadle_scheduling_policy(name):\n    return 'mine'\n"
    file.write_text(code)
    plan = sent(site.plugin_manager(plugin_file=[str(file)]).selection())
    assert (
        PluginManager.from_selection(plan, source=site.scan).create(SCHEDULING_POLICIES, "p")
        == "mine"
    )
    file.write_text(code + "# edited\n")
    with pytest.raises(PluginLoadError, match=r"the parent has mine\.py .*, this worker has"):
        PluginManager.from_selection(plan, source=site.scan).create(SCHEDULING_POLICIES, "p")
    file.unlink()
    with pytest.raises(PluginLoadError, match="this worker has none"):
        PluginManager.from_selection(plan, source=site.scan).create(SCHEDULING_POLICIES, "p")
