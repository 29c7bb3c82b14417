"""What pages quote from elsewhere is there: messages of the code, figures, names of options."""

from __future__ import annotations

import ast
import json
import re
from importlib import metadata

import pytest
import schema_keywords
from http_api import document
from packaging.version import Version
from repository import ROOT, members, shipped

GAP = "…"
HEADINGS = re.findall(
    r"^### (.+)$",
    (ROOT / "docs/do/troubleshoot.md").read_text().partition("\n## Memory")[2],
    re.MULTILINE,
)


def texts() -> list[str]:
    """The texts in the code of all members, with ``…`` for what is filled in."""
    strings = []
    for member in members():
        for path in shipped(member):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = (p.value if isinstance(p, ast.Constant) else GAP for p in node.values)
                    strings.append("".join(str(part) for part in parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    strings.append(node.value)
    return strings


@pytest.fixture(scope="module")
def messages() -> str:
    return "\n".join(texts())


@pytest.mark.parametrize("heading", HEADINGS)
def test_a_message_of_the_troubleshooting_page_is_one_of_the_code(
    heading: str, messages: str
) -> None:
    words = re.sub(r" \(\d{3}\)$", "", heading)
    pieces = [re.escape(piece.strip()) for piece in words.split(GAP) if piece.strip()]
    assert re.search(r"[^\n]*?".join(pieces), messages), words


def test_the_figures_of_the_readme_were_measured() -> None:
    runs = json.loads((ROOT / "docs/data/runs/h200.json").read_text())
    measured = {n for run in runs["runs"] for n in run["tokens_per_second"].values()}
    measured |= {n for numbers in runs["other_cards"].values() for n in numbers}
    claimed = re.findall(r"\d+,\d{3}", (ROOT / "README.md").read_text())
    assert claimed and {int(n.replace(",", "")) for n in claimed} <= measured


def test_each_run_says_how_it_was_made() -> None:
    for file in sorted((ROOT / "docs/data/runs").glob("*.json")):
        data = json.loads(file.read_text())
        assert all(data[key] for key in ("device", "date", "torch", "weights"))
        assert all("command" in run for run in data["runs"] if run["engine"].startswith("treadle"))


@pytest.mark.skipif(
    Version(metadata.version("litestar")) < Version("2.25"),
    reason="litestar leaves out what describes a field with a schema of its own",
)
def test_every_field_of_the_http_api_is_described() -> None:
    silent = [
        f"{name}.{field}"
        for name, schema in document()["components"]["schemas"].items()
        for field, about in schema.get("properties", {}).items()
        if not about.get("description")
    ]
    assert silent == []


def test_the_metrics_that_a_page_names_exist() -> None:
    listed = set(
        re.findall(r"^\| `(\w+)`", (ROOT / "docs/ref/metrics.md").read_text(), re.MULTILINE)
    )
    watched = (ROOT / "docs/do/monitor.md").read_text()
    assert set(re.findall(r"treadle_(?!server\.)\w+", watched)) <= listed


def test_the_table_of_keywords_names_no_mistake() -> None:
    """A backend enforces a keyword or refuses it; ``tools/sync.py`` writes what was measured."""
    for keyword, *outcomes in schema_keywords.table():
        assert set(outcomes) <= {"✓", "refused"}, keyword
