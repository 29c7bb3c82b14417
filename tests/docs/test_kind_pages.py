"""docs/plugins: one page for each kind, with what an author must know and a plugin that runs."""

from __future__ import annotations

import re
from string import Template

import pytest
from repository import ROOT

from weft.plugins import KINDS

FOLDER = ROOT / "docs/plugins"
PARTS = ("**It gets.** ", "**It returns.** ", "**Threads.** ", "**When it fails.** ")


def test_every_kind_has_a_page_and_no_other() -> None:
    assert {path.stem for path in FOLDER.glob("*.md")} == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_says_what_an_author_must_know(kind: str) -> None:
    text = (FOLDER / f"{kind}.md").read_text()
    for part in PARTS:
        said = text.partition(part)[2].split("\n")[0]
        assert len(said) > 10, f"{kind}: {part}"
    assert f"{KINDS[kind].hook}(" in text


@pytest.mark.parametrize("kind", KINDS)
def test_the_example_is_the_template_that_the_tests_run(kind: str) -> None:
    """tests/cli/test_templates.py installs every template and runs its test; here is the same."""
    text = (FOLDER / f"{kind}.md").read_text()
    shown = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    for code in shown:
        compile(code, f"{kind}.md", "exec")
    key = "MyForCausalLM" if kind == "models" else "mine"
    marks = {"key": key, "package": f"weft_{key.lower()}", "kind": kind, "title": "Mine"}
    files = (ROOT / "cli/weft_cli/templates" / kind).glob("*.py.in")
    wanted = [Template(path.read_text()).substitute(marks) for path in files]
    assert sorted(shown) == sorted(wanted)
    assert any(f"def {KINDS[kind].hook}(" in code for code in shown)


def test_the_versions_of_the_pages_are_those_of_the_contract() -> None:
    for kind, about in KINDS.items():
        assert f"generation {about.generation}." in (FOLDER / f"{kind}.md").read_text()
