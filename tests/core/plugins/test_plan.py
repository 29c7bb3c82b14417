"""A worker gets the parent's choices and refuses where its installation differs."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from treadle.config import PluginConfig
from treadle.errors import PluginConflictError, PluginLoadError
from treadle.plugins import Host, Plan


def sent(plan: Plan) -> Plan:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=Plan)


def test_the_plan_holds_what_was_chosen(site):
    site.scheme("acme-awq", "awq", "gptq")
    site.scheme("other-awq", "awq")
    site.scheme("marlin", "gptq", override=True)
    plan = site.host(plugin=["quantization:awq=other-awq"]).plan()
    assert [(c.key, c.dist, c.target, c.version) for c in plan.choices] == [
        ("awq", "other-awq", "other_awq", "1.0"),
        ("gptq", "marlin", "marlin", "1.0"),
    ]


def test_a_worker_follows_the_plan_and_not_its_environment(site, monkeypatch):
    site.scheme("acme-awq", "awq")
    site.scheme("other-awq", "awq")
    config = PluginConfig(
        plugin=["quantization:awq=other-awq"], plugin_options={"quantization:awq": {"x": 1}}
    )
    plan = sent(Host(config, source=site.scan).plan())
    monkeypatch.setenv("TREADLE_DISABLE", "other-awq")
    scheme = Host.from_plan(plan, config, source=site.scan).quantization("awq", {}, None)
    assert (scheme.name, scheme.options) == ("other-awq", {"x": 1})


def test_a_fallback_pinned_for_a_key_stays_so(site):
    site.scheme("any-quant", "*")
    site.scheme("acme-awq", "awq")
    plan = sent(site.host(plugin=["quantization:awq=any-quant"]).plan())
    assert Host.from_plan(plan, source=site.scan).quantization("awq", {}, None).name == "any-quant"


def test_a_worker_meets_the_same_conflict(site):
    site.scheme("acme-awq", "awq")
    site.scheme("other-awq", "awq")
    host = Host.from_plan(sent(site.host().plan()), source=site.scan)
    with pytest.raises(PluginConflictError, match=r"acme-awq 1\.0, other-awq 1\.0"):
        host.quantization("awq", {}, None)


@pytest.mark.parametrize(
    ("version", "reason"), [("2.0", "this worker has 2.0"), (None, "this worker has none")]
)
def test_a_difference_of_installations_is_refused_for_that_key_only(site, version, reason):
    site.scheme("acme-awq", "awq")
    site.scheme("same-fp8", "fp8")
    plan = sent(site.host().plan())

    def elsewhere():
        for entry in site.scan():
            if entry.dist == "acme-awq":
                entry.version = version
            if entry.version:
                yield entry

    host = Host.from_plan(plan, source=elsewhere)
    assert host.quantization("fp8", {}, None).name == "same-fp8"
    with pytest.raises(PluginLoadError, match=f"the parent has acme-awq 1.0, {reason}"):
        host.quantization("awq", {}, None)


def test_a_real_worker_process(site):
    site.scheme("acme-awq", "awq")
    plan = msgspec.msgpack.encode(site.host().plan()).hex()
    code = (
        "import sys, msgspec; from treadle.plugins import Host, Plan; "
        "plan = msgspec.msgpack.decode(bytes.fromhex(sys.argv[1]), type=Plan); "
        "print(Host.from_plan(plan).quantization('awq', {}, None).name)"
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
    code = "from treadle.api import impl\nTREADLE = {'policies': ['p']}\n@impl\ndef treadle_policy(name):\n    return 'mine'\n"
    file.write_text(code)
    plan = sent(site.host(plugin_file=[str(file)]).plan())
    assert Host.from_plan(plan, source=site.scan).policy("p") == "mine"
    file.write_text(code + "# edited\n")
    with pytest.raises(PluginLoadError, match=r"the parent has mine\.py .*, this worker has"):
        Host.from_plan(plan, source=site.scan).policy("p")
    file.unlink()
    with pytest.raises(PluginLoadError, match="this worker has none"):
        Host.from_plan(plan, source=site.scan).policy("p")
