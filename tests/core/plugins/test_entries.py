"""Discovery from metadata."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from treadle.api.hookspecs import AllResultsHooks, FirstResultHooks
from treadle.api.kinds import QUANTIZATION
from treadle.api.plugin_kind import parse_group
from treadle.config import PluginConfig
from treadle.plugins import PluginManager, installed_kinds
from treadle.plugins.entries import scan
from treadle.testing.examination.findings import entry_findings


def test_scan_yields_what_metadata_declares(site):
    site.scheme("acme-awq", "awq", "awq_marlin")
    assert [(e.id, e.owner, e.target, e.state) for e in site.scan()] == [
        ("quantization:awq", "acme-awq 1.0", "acme_awq", "ready"),
        ("quantization:awq_marlin", "acme-awq 1.0", "acme_awq", "ready"),
    ]


def test_scan_imports_nothing(site):
    module = site.install(
        "loud", {"treadle.quantization": {"x": "loud"}}, "raise SystemExit('imported')"
    )
    PluginManager(source=site.scan)
    assert module not in sys.modules


def test_scan_of_this_installation_finds_the_core():
    mine = {e.id for e in scan() if e.dist == "treadle-core"}
    assert {
        "scheduling_policies:fcfs",
        "model_sources:file",
    } <= mine


def test_a_shadowed_version_is_not_listed(site, tmp_path, monkeypatch):
    site.scheme("acme-awq", "awq", version="1.0")
    near = type(site)(tmp_path / "near")
    near.folder.mkdir()
    near.install("acme-awq", {"treadle.quantization": {"gptq": "acme_awq"}}, version="2.0")
    monkeypatch.syspath_prepend(str(near.folder))
    assert [(e.id, e.version) for e in site.scan()] == [("quantization:gptq", "2.0")]


@pytest.mark.parametrize(
    ("group", "parsed"),
    [
        ("treadle.attention_backends", ("attention_backends", 1)),
        ("treadle.attention_backends.v2", ("attention_backends", 2)),
        ("treadle.attention_backends.beta", ("attention_backends.beta", 0)),
        ("pytest11", None),
        ("treadle.kinds", None),
        ("treadleage.attention_backends", None),
    ],
)
def test_group_names(group, parsed):
    assert parse_group(group) == parsed


def test_another_generation_is_incompatible_and_says_so(site):
    site.install("next-awq", {"treadle.quantization.v2": {"awq": "next_awq"}})
    [entry] = site.plugin_manager().entries
    assert (entry.state, entry.reason) == (
        "incompatible",
        "speaks quantization v2, this treadle speaks v1",
    )


@pytest.mark.parametrize("generation", [1, 2])
def test_a_distribution_may_offer_two_generations(site, generation):
    """The one that is spoken is used and locked, and the doctor has nothing to say."""
    kinds = {"quantization": replace(QUANTIZATION, generation=generation)}
    groups = {"treadle.quantization": {"awq": "old"}, "treadle.quantization.v2": {"awq": "new"}}
    site.install("both-awq", groups)
    plugins = PluginManager(PluginConfig(), source=site.scan, kinds=kinds)
    owner = plugins.choose("quantization", "awq")
    assert (owner.target, owner.generation) == ({1: "old", 2: "new"}[generation], generation)
    assert [(p.id, p.generation) for p in plugins.lock().plugins] == [
        ("quantization:awq", generation)
    ]
    assert [f for e in plugins.entries for f in entry_findings(plugins, e)] == []
    site.install("late-awq", {f"treadle.quantization.v{3 - generation}": {"awq": "late"}})
    plugins = PluginManager(PluginConfig(), source=site.scan, kinds=kinds)
    (finding,) = [f for e in plugins.entries for f in entry_findings(plugins, e)]
    assert finding.code == "generation"


def test_an_unknown_kind_is_incompatible(site):
    site.install("odd", {"treadle.telepathy": {"x": "odd"}})
    [entry] = site.plugin_manager().entries
    assert entry.state == "incompatible" and "unknown kind 'telepathy'" in entry.reason


def test_every_hook_belongs_to_a_kind_or_to_all_plugins():
    hooks = {
        n for c in (FirstResultHooks, AllResultsHooks) for n in vars(c) if n.startswith("treadle_")
    }
    core = {k.hook for k in installed_kinds().values() if k.owner == "treadle-core"}
    more = {"treadle_match", "treadle_model_config", "treadle_unconfigure", "treadle_report"}
    assert hooks == core | more


def test_host_and_hookspecs_import_no_torch():
    code = "import sys, treadle.plugins; treadle.plugins.PluginManager(); print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def test_a_fallback_of_a_kind_without_one_is_incompatible(site):
    site.install("any", {"treadle.attention_backends": {"*": "any"}})
    [entry] = site.plugin_manager().entries
    assert (entry.state, entry.reason) == (
        "incompatible",
        "the kind attention_backends has no fallback; name a key",
    )
