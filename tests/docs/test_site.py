"""The documentation builds, and the site needs nothing that it does not bring."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from repository import ROOT
from site_builder import build, problems


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("documentation") / "site"
    assert build(folder) == []
    return folder


def test_every_page_is_built_and_lies_beside_its_source(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs")
        folder = name.parent if page.name in ("index.md", "README.md") else name.with_suffix("")
        assert (site / folder / "index.html").is_file(), name
        assert (site / name).read_text() == page.read_text()
        assert f"]({name.as_posix()})" in (site / "llms.txt").read_text()


def test_former_addresses_lead_to_pages(site: Path) -> None:
    stub = site / "plugins/models/index.html"
    (address,) = re.findall(r'url=([^"]+)"', stub.read_text())
    assert (
        stub.parent / address / "index.html"
    ).resolve() == site / "ref/plugins/models/index.html"
    for page in site.rglob("index.html"):
        for address in re.findall(
            r'http-equiv="refresh" content="0; url=([^"]+)"', page.read_text()
        ):
            assert (page.parent / address / "index.html").is_file(), page


def test_mermaid_comes_with_the_site(site: Path) -> None:
    """The theme would fetch it from elsewhere, unless a script has defined it before."""
    drawn = [p for p in site.rglob("*.html") if '<pre class="mermaid">' in p.read_text()]
    assert drawn
    for page in drawn:
        text = page.read_text()
        scripts = re.findall(r'<script src="?([^">]+)', text)
        assert "mermaid.tiny.js" in scripts[0], (
            f"{page}: give it `diagrams: true` in its front matter"
        )


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('<script src="https://unpkg.com/x.js"></script>', "another host"),
        ('<link rel="stylesheet" href="//cdn.example/x.css">', "another host"),
        ('<img alt="a" src="missing.png">', "does not exist"),
        ('<img alt="a" src="there.png">', None),
        ('<a href="https://example.org">a link is not a resource</a>', None),
    ],
)
def test_what_the_builder_does_not_see_is_found(
    tmp_path: Path, line: str, expected: str | None
) -> None:
    (tmp_path / "there.png").write_bytes(b"")
    (tmp_path / "index.html").write_text(line)
    assert [expected in problem for problem in problems(tmp_path)] == ([True] if expected else [])
