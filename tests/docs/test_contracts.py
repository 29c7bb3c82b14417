"""What has changed between core and plugins, and that nothing breaks them without a new generation."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import contracts
import pytest

from treadle.plugins import installed_kinds


@pytest.fixture(scope="module")
def contract() -> Any:
    return contracts.contract()


def changed(contract: Any, edit: Callable[[Any], object]) -> list[contracts.Change]:
    new = deepcopy(contract)
    edit(new)
    return contracts.changes(contract, new)


def test_what_breaks_plugins_is_a_new_generation(contract: Any) -> None:
    """Compared with the newest recorded version: whoever breaks a contract raises ``generation``."""
    version, old = list(contracts.recorded().items())[-1]
    for change in contracts.changes(old, contract):
        if change.is_compatible:
            continue
        for kind in change.kinds:
            before, after = old["kinds"].get(kind), contract["kinds"].get(kind)
            if before is not None and after is not None:
                assert after["generation"] > before["generation"], f"since {version}: {change.text}"


def test_every_kind_and_what_it_builds_is_in_the_contract(contract: Any) -> None:
    assert contract["kinds"].keys() == installed_kinds().keys()
    for kind in installed_kinds().values():
        for built in filter(None, (kind.builds, *kind.optional)):
            if built.__module__.startswith("treadle.api"):
                assert contract["types"][built.__name__], built.__name__
        assert "return" in contract["hooks"][kind.hook]


def test_the_same_contract_has_no_changes(contract: Any) -> None:
    assert changed(contract, lambda c: None) == []


PARSER, QUEUED, SPEC = (("types", n) for n in ("ToolParser", "QueuedRequest", "GrammarSpec"))


@pytest.mark.parametrize(
    ("edit", "kind", "words", "is_compatible"),
    [
        (lambda c: c["hooks"]["treadle_tool_parser"].update(more="int"), "tool_parsers",
         "The argument `more` of `treadle_tool_parser` is new: `int`.", True),
        (lambda c: c["hooks"]["treadle_tool_parser"].pop("tools"), "tool_parsers",
         "The argument `tools` of `treadle_tool_parser` is gone.", False),
        (lambda c: c["hooks"]["treadle_tool_parser"].update(name="int"), "tool_parsers",
         "The argument `name` of `treadle_tool_parser` is `int`, before `str`.", False),
        (lambda c: c["hooks"]["treadle_tool_parser"].update({"return": "X"}), "tool_parsers",
         "The result of `treadle_tool_parser` is `X`, before `t.ToolParser | None`.", False),
        (lambda c: c["types"]["ToolParser"].update(more=["() -> int", "is required"]), "tool_parsers",
         "`ToolParser.more` is new: `() -> int`.", False),
        (lambda c: c["types"]["ToolParser"].pop("finish"), "tool_parsers",
         "`ToolParser.finish` is gone.", False),
        (lambda c: c["types"]["QueuedRequest"].update(more=["() -> int", "is required"]), "scheduling_policies",
         "`QueuedRequest.more` is new: `() -> int`.", True),
        (lambda c: c["types"]["GrammarSpec"].update(more=["int", "has a default"]), "tool_parsers",
         "`GrammarSpec.more` is new: `int`.", True),
        (lambda c: c["types"]["GrammarSpec"].update(more=["int", "is required"]), "structured_output",
         "`GrammarSpec.more` is new: `int`.", False),
        (lambda c: c["types"]["GrammarSpec"].update(options=["Mapping[str, Any]", "is required"]), "tool_parsers",
         "`GrammarSpec.options` is required.", False),
        (lambda c: c["types"].pop("Match"), "renderers", "`Match` is gone.", False),
        (lambda c: c["kinds"]["models"].update(generation=2), "models",
         "`models` is generation 2, before 1.", False),
        (lambda c: c["kinds"]["models"].update(mode="many"), "models",
         "`mode` of `models` is `many`, before `one`.", False),
        (lambda c: c["kinds"].pop("models"), "models", "The kind `models` is gone.", False),
        (lambda c: c["hooks"].pop("treadle_model"), "models", "The hook `treadle_model` is gone.", False),
    ],
)  # fmt: skip
def test_a_change_is_named_with_its_kinds(
    contract: Any, edit: Any, kind: str, words: str, is_compatible: bool
) -> None:
    found = {change.text: change for change in changed(contract, edit)}
    assert words in found, list(found)
    assert kind in found[words].kinds and found[words].is_compatible is is_compatible


def test_what_is_new_breaks_nobody(contract: Any) -> None:
    old = deepcopy(contract)
    for table, name in (("hooks", "treadle_model"), ("types", "Match"), ("kinds", "server")):
        del old[table][name]
    assert all(change.is_compatible for change in contracts.changes(old, contract))
