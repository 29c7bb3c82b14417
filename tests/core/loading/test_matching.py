"""Choosing by match: the best wins, of equal ones treadle's own, and a broken plugin costs nobody else."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from treadle.api.kinds import QUANTIZATION, REASONING_PARSERS, RENDERERS, TOOL_PARSERS
from treadle.api.matching import ModelTraits
from treadle.api.plugin_kind import PluginKind
from treadle.config import PluginConfig
from treadle.errors import ConfigError, PluginConflictError, PluginLoadError
from treadle.loading.matching import AUTO, NONE, Candidate, decide
from treadle.plugins import PluginManager
from treadle.plugins.entries import Entry

PLUGIN = """
from treadle.api import impl
from treadle.api.matching import Match

TREADLE = {{"tool_parsers": {keys!r}}}
asked = []


@impl
def treadle_match(kind, key, model, options):
    asked.append(key)
    answers = {answers}
    return answers[key](model)
"""
EQUAL = """
from treadle.api import impl
from treadle.api.matching import Match


@impl
def treadle_match(kind, key, model, options):
    return Match(100, "all")
"""
OWNERS = {"acme": "acme", "own": "treadle-llama", "zeta": "zeta"}
MODEL = ModelTraits(config={"model_type": "a"}, templates={"default": "<a>", "tool_use": "<b>"})
WORSE = 'lambda m: Match(50, "the template writes <b>") if m.template_contains("<b>") else None'
BETTER = 'lambda m: Match(100, "its type is a") if m.config.get("model_type") == "a" else None'


def make_plugins(tmp_path: Path, *, strict: bool = False, **answers: str) -> PluginManager:
    text = ", ".join(f"{key!r}: {answer}" for key, answer in answers.items())
    file = tmp_path / "matching.py"
    file.write_text(PLUGIN.format(keys=list(answers), answers=f"{{{text}}}"))
    return PluginManager(PluginConfig(plugin_file=[str(file)], plugin_strict=strict), source=list)


def test_the_best_match_wins_and_the_others_are_told(tmp_path: Path) -> None:
    decision = decide(
        make_plugins(tmp_path, a="lambda m: None", b=WORSE, c=BETTER), TOOL_PARSERS, MODEL, AUTO
    )
    assert (decision.key, decision.reason) == ("c", "its type is a (score 100)")
    assert list(decision.alternatives) == [
        Candidate("b", 50, "the template writes <b>"),
        Candidate("a", 0, "sees nothing of its own"),
    ]


def test_a_worse_match_is_taken_where_the_better_one_sees_nothing(tmp_path: Path) -> None:
    traits = ModelTraits(templates=MODEL.templates)
    decision = decide(make_plugins(tmp_path, b=WORSE, c=BETTER), TOOL_PARSERS, traits, AUTO)
    assert decision.key == "b"


def matching_entries(tmp_path: Path, **dists: str) -> PluginManager:
    """A plugin for each key, of the distribution of that name; all match the model equally well."""
    file = tmp_path / f"equal_{uuid4().hex}.py"
    file.write_text(EQUAL)
    entries = [
        Entry(kind, key, file.stem, dist, "1", file=str(file))
        for kind in ("tool_parsers", "reasoning_parsers", "renderers", "quantization")
        for key, dist in dists.items()
    ]
    return PluginManager(source=lambda: entries)


@pytest.mark.parametrize("kind", [TOOL_PARSERS, REASONING_PARSERS, RENDERERS, QUANTIZATION])
def test_of_equal_matches_treadles_own_is_used_and_a_line_names_all(
    kind: PluginKind[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plugins = matching_entries(tmp_path, **OWNERS)
    decision = decide(plugins, kind, MODEL, AUTO)
    assert (decision.key, decision.reason) == ("own", "all (score 100)")
    assert [c.key for c in decision.alternatives] == ["acme", "zeta"]
    (line,) = caplog.messages
    assert line.startswith(f"treadle's own {kind.name}:own is used; several {kind.name} match")
    claims = [f"\n  {key} from {dist} 1: all" for key, dist in OWNERS.items()]
    assert line.endswith(f"choose one with {kind.option} NAME:" + "".join(claims))
    assert decide(plugins, kind, MODEL, "zeta").key == "zeta"


TWO_STRANGERS = r"choose one with {} NAME:\n  acme from acme 1: all\n  zeta from zeta 1: all$"


@pytest.mark.parametrize("kind", [TOOL_PARSERS, REASONING_PARSERS])
def test_of_two_equal_strangers_no_parser_is_used(
    kind: PluginKind[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    decision = decide(matching_entries(tmp_path, zeta="zeta", acme="acme"), kind, MODEL, AUTO)
    assert decision.key is None and [c.key for c in decision.alternatives] == ["acme", "zeta"]
    assert re.search(TWO_STRANGERS.format(kind.option), decision.reason)
    assert caplog.messages == [f"none is used; {decision.reason}"]


@pytest.mark.parametrize("kind", [RENDERERS, QUANTIZATION])
def test_what_an_engine_cannot_do_without_is_a_conflict(
    kind: PluginKind[Any], tmp_path: Path
) -> None:
    with pytest.raises(PluginConflictError, match=TWO_STRANGERS.format(kind.option)):
        decide(matching_entries(tmp_path, zeta="zeta", acme="acme"), kind, MODEL, AUTO)


def test_in_strict_mode_equal_matches_are_a_conflict(tmp_path: Path) -> None:
    plugins = make_plugins(tmp_path, strict=True, b=WORSE, d=BETTER, c=BETTER)
    with pytest.raises(
        PluginConflictError, match="--tool-call-parser NAME:\n  c from "
    ) as exc_info:
        decide(plugins, TOOL_PARSERS, MODEL, AUTO)
    assert "  d from " in str(exc_info.value) and "b from" not in str(exc_info.value)


def test_no_match(tmp_path: Path) -> None:
    decision = decide(make_plugins(tmp_path, b=WORSE), TOOL_PARSERS, ModelTraits(), AUTO)
    assert decision.key is None and "no installed plugin matches" in decision.reason
    assert [c.key for c in decision.alternatives] == ["b"]


def test_a_name_and_none_ask_nobody(tmp_path: Path) -> None:
    plugins = make_plugins(tmp_path, b=WORSE, c=BETTER)
    assert decide(plugins, TOOL_PARSERS, MODEL, "b").key == "b"
    assert decide(plugins, TOOL_PARSERS, MODEL, NONE).key is None
    assert plugins.states() == {}, "a plugin was imported"


def test_a_plugin_without_the_hook_is_used_by_name_only(tmp_path: Path) -> None:
    file = tmp_path / "silent.py"
    file.write_text(
        'from treadle.api import impl\nTREADLE = {"tool_parsers": ["silent"]}\n'
        "@impl\ndef treadle_tool_parser(name): return None\n"
    )
    silent = PluginManager(PluginConfig(plugin_file=[str(file)]), source=list)
    decision = decide(silent, TOOL_PARSERS, MODEL, AUTO)
    assert decision.key is None
    assert list(decision.alternatives) == [Candidate("silent", 0, "does not say what it matches")]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("lambda m: 1 / 0", "ZeroDivisionError"),
        ("lambda m: True", "answered treadle_match with True"),
        ('lambda m: Match(0, "nothing")', "score above 0"),
        ('lambda m: Match("100", "much")', "score above 0"),
        ('lambda m: Match(100, "")', "a reason"),
    ],
)
def test_a_broken_match_is_reported_and_counts_as_none(
    answer: str, message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        decision = decide(make_plugins(tmp_path, a=answer, b=WORSE), TOOL_PARSERS, MODEL, AUTO)
    assert decision.key == "b"
    assert message in decision.alternatives[0].reason and message in caplog.text
    with pytest.raises(PluginLoadError, match=message):
        decide(make_plugins(tmp_path, strict=True, a=answer, b=WORSE), TOOL_PARSERS, MODEL, AUTO)


def test_a_plugin_that_cannot_be_imported_counts_as_none(tmp_path: Path) -> None:
    broken = Entry("tool_parsers", "a", "no_such_module", "treadle-broken", "1")
    plugins = make_plugins(tmp_path, b=WORSE)
    plugins.entries.append(broken)
    decision = decide(plugins, TOOL_PARSERS, MODEL, AUTO)
    assert decision.key == "b" and "no_such_module" in decision.alternatives[0].reason


def test_wrong_options_are_the_users_error(tmp_path: Path) -> None:
    file = tmp_path / "with_options.py"
    file.write_text(
        "import msgspec\nfrom treadle.api import impl\n"
        'TREADLE = {"tool_parsers": ["a"]}\n'
        "class Options(msgspec.Struct, frozen=True):\n    size: int = 1\n"
        'TREADLE_OPTIONS = {"tool_parsers:a": Options}\n'
        "@impl\ndef treadle_match(kind, key, model): return None\n"
    )
    options = {"tool_parsers:a": {"size": "big"}}
    plugins = PluginManager(
        PluginConfig(plugin_file=[str(file)], plugin_options=options), source=list
    )
    with pytest.raises(ConfigError, match=r"--plugin\.tool_parsers\.a\.size"):
        decide(plugins, TOOL_PARSERS, MODEL, AUTO)
