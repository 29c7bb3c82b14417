"""What the documentation says about the repository is compared with the repository."""

from __future__ import annotations

import re
import subprocess

import pytest
import yaml
from pages import blocks, pages
from repository import ROOT, Hook, hooks, members

LINK = re.compile(r"\]\((?!https?://|mailto:)([^)#\s]+)(?:#[^)]*)?\)")
REFERENCE = (ROOT / "docs/ref/plugins.md").read_text()


@pytest.mark.parametrize("hook", hooks(), ids=lambda h: h.name)
def test_every_hook_is_documented_with_its_arguments(hook: Hook) -> None:
    assert f"`{hook.name}({', '.join(hook.arguments)})`" in REFERENCE


def test_the_reference_documents_no_hook_that_is_gone() -> None:
    documented = set(re.findall(r"^### (treadle_\w+)$", REFERENCE, re.MULTILINE))
    assert documented == {hook.name for hook in hooks()}


def test_relative_links_lead_somewhere() -> None:
    written = [*pages(), *(ROOT / "docs/adr").glob("*.md"), *ROOT.glob("*.md")]
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in written
        for target in LINK.findall(page.read_text())
        if not (page.parent / target).exists()
    ]
    assert broken == []


class Configuration(yaml.SafeLoader):
    """Reads mkdocs.yml, which names a Python function."""


Configuration.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda *_: None)


def navigation(entry: object) -> set[str]:
    """The files that the navigation of mkdocs.yml names."""
    if isinstance(entry, str):
        return {entry}
    parts = entry.values() if isinstance(entry, dict) else entry
    return {name for part in parts for name in navigation(part)}  # type: ignore[attr-defined]


def test_every_page_is_in_the_navigation() -> None:
    """Decisions and experiments are in an index of their own instead."""
    config = yaml.load((ROOT / "mkdocs.yml").read_text(), Configuration)
    files = {p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.md")}
    records = {f for f in files if re.match(r"(adr|how/notebook)/\d{4}-", f)}
    assert navigation(config["nav"]) == files - records


def test_every_decision_is_in_the_index() -> None:
    folder = ROOT / "docs/adr"
    index = (folder / "README.md").read_text()
    for decision in sorted(folder.glob("0*.md")):
        title = decision.read_text().splitlines()[0].removeprefix(f"# {decision.name[:4]}: ")
        assert f"| [{decision.name[:4]}]({decision.name}) | {title} |" in index
    numbers = [int(p.name[:4]) for p in sorted(folder.glob("0*.md"))]
    assert numbers == list(range(1, len(numbers) + 1))


def test_ci_runs_the_commands_that_a_newcomer_is_told() -> None:
    """The first two shell blocks of README.md are what ``.ci/run`` does."""
    script = (ROOT / ".ci/run").read_text()
    commands = [b.commands for b in blocks(ROOT / "README.md") if b.language == "bash"][:2]
    assert len(commands) == 2
    for (command,) in commands:
        assert re.search(rf"(^|[ ]){re.escape(command)}$", script, re.MULTILINE), command


def test_ci_installs_as_contributors_are_told() -> None:
    script = (ROOT / "test").read_text()
    first = next(b for b in blocks(ROOT / "CONTRIBUTING.md") if b.language == "bash")
    commands = [c for c in first.commands if c.startswith("pip ")]
    assert commands
    for command in commands:
        assert f'"$venv/bin/pip" {command.removeprefix("pip ")}' in script, command


def test_the_errors_drawn_are_the_errors_defined() -> None:
    import treadle.errors

    drawn = set(re.findall(r"\w+Error\b", (treadle.errors.__doc__ or "").split("A message")[0]))
    assert drawn == set(treadle.errors.__all__)


def test_imports_of_the_examples_stay_in_the_public_modules() -> None:
    """A reader who copies an example must not depend on the inside of the core."""
    public = re.compile(
        r"(treadle(\.(api|compat|errors|config|testing|layers)(\.\w+)*)?|treadle_\w+|treadle_\w+_kit\.\w+)$"
    )
    violations = [
        f"{block.page.name}:{block.line} {module}"
        for page in pages()
        for block in blocks(page)
        if block.language == "python"
        for module in re.findall(r"^\s*(?:from|import) (treadle[\w.]*)", block.code, re.MULTILINE)
        if not public.match(module)
    ]
    assert violations == []


def test_every_variable_of_the_environment_is_documented() -> None:
    sources = (ROOT / "core/treadle/config.py", ROOT / "server/treadle_server/config.py")
    code = "".join(source.read_text() for source in sources)
    read = set(re.findall(r'"(TREADLE_[A-Z_]+)"', code))
    listed = set(
        re.findall(r"^\| `(TREADLE_[A-Z_]+)", (ROOT / "docs/ref/options.md").read_text(), re.M)
    )
    assert listed == read


def test_every_command_that_is_named_exists() -> None:
    """Prose too: `treadle serve` in a sentence must be a command of the command line."""
    commands = {e.key for m in members() for e in m.entry_points if e.kind == "commands"}
    written = [*pages(), *ROOT.glob("*.md"), *ROOT.glob("plugins/**/README.md")]
    unknown = [
        f"{page.relative_to(ROOT)}: treadle {word}"
        for page in written
        for word in re.findall(r"`treadle ([a-z]+)", page.read_text())
        if word not in commands
    ]
    assert unknown == []


def test_nothing_is_installed_by_a_name_that_an_index_does_not_have() -> None:
    """Our distributions are not published: every instruction names a folder of a clone instead."""
    pattern = r"pip install[^`\n&]*(?<![./\w-])treadle(?:-[a-z0-9-]+)?(?![\w/-])"
    files = subprocess.run(
        ["git", "ls-files", "*.md", "*.py", "*.in"], cwd=ROOT, capture_output=True, text=True
    )
    named = [
        f"{name}: {match}"
        for name in files.stdout.split()
        if (ROOT / name).is_file()
        for match in re.findall(pattern, (ROOT / name).read_text())
    ]
    assert [
        line for line in named if not line.startswith("plugins/model_sources/demo/training")
    ] == []
