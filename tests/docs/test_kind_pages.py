"""docs/ref/plugins: one page for each kind, with what an author must know and a plugin that runs."""

from __future__ import annotations

import inspect
import re
from string import Template

import pytest
from repository import ROOT, hooks

from treadle.api.hookspecs import AllResultsHooks, FirstResultHooks
from treadle.plugins import installed_kinds
from treadle_cli.hookspecs import CommandHooks
from treadle_server.hookspecs import ServerHooks

FOLDER = ROOT / "docs/ref/plugins"
PARTS = ("**It gets.** ", "**It returns.** ", "**Threads.** ", "**When it fails.** ")


def test_every_kind_has_a_page_and_no_other() -> None:
    assert {path.stem for path in FOLDER.glob("*.md")} == set(installed_kinds())


@pytest.mark.parametrize("kind", installed_kinds())
def test_a_page_says_what_an_author_must_know(kind: str) -> None:
    text = (FOLDER / f"{kind}.md").read_text()
    for part in PARTS:
        sentence = text.partition(part)[2].split("\n")[0]
        assert len(sentence) > 10, f"{kind}: {part}"
    assert f"{installed_kinds()[kind].hook}(" in text


def pages_of(hook: str) -> list[str]:
    """The pages on which an author looks for a hook."""
    if hook == "treadle_match":
        return [name for name, kind in installed_kinds().items() if kind.matches]
    if hook == "treadle_model_config":
        return ["models"]
    if hook in ("treadle_unconfigure", "treadle_report"):
        return ["extensions"]
    return [name for name, kind in installed_kinds().items() if kind.hook == hook]


def specifications() -> dict[str, str]:
    """Every hook of treadle, with its arguments and types as they stand in the specification."""
    signatures = {}
    for specs in (FirstResultHooks, AllResultsHooks, ServerHooks, CommandHooks):
        for name, function in vars(specs).items():
            if name.startswith("treadle_"):
                signature = inspect.signature(function)
                parameters = [p for p in signature.parameters.values() if p.name != "self"]
                arguments = ", ".join(f"{p.name}: {p.annotation}" for p in parameters)
                signatures[name] = f"{name}({arguments}) -> {signature.return_annotation}"
    return signatures


@pytest.mark.parametrize("hook", specifications())
def test_a_hook_is_on_its_pages_with_its_exact_arguments(hook: str) -> None:
    assert pages_of(hook), "it belongs to no kind"
    for kind in pages_of(hook):
        lines = (FOLDER / f"{kind}.md").read_text().splitlines()
        stated = [line for line in lines if line.startswith(f"{hook}(")]
        assert stated == [specifications()[hook]], f"{kind}.md: {stated}"


def test_all_hooks_are_known_here() -> None:
    assert {hook.name for hook in hooks()} == set(specifications())


@pytest.mark.parametrize("kind", installed_kinds())
def test_the_example_is_the_template_that_the_tests_run(kind: str) -> None:
    """tests/cli/test_templates.py installs every template and runs its test; here is the same."""
    text = (FOLDER / f"{kind}.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    for code in examples:
        compile(code, f"{kind}.md", "exec")
    key = "MyForCausalLM" if kind == "models" else "mine"
    marks = {"key": key, "package": f"treadle_{key.lower()}", "kind": kind, "title": "Mine"}
    files = (ROOT / "cli/treadle_cli/templates" / kind).glob("*.py.in")
    expected = [Template(path.read_text()).substitute(marks) for path in files]
    assert sorted(examples) == sorted(expected)
    assert any(f"def {installed_kinds()[kind].hook}(" in code for code in examples)


def test_the_versions_of_the_pages_are_those_of_the_contract() -> None:
    for kind, about in installed_kinds().items():
        assert f"generation {about.generation}." in (FOLDER / f"{kind}.md").read_text()
