"""The pages are written as CONTRIBUTING.md asks, as far as a program can tell."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages import blocks, pages
from repository import ROOT

DOCS = ROOT / "docs"
LIMITS = {"learn": 150, "do": 120, "extend": 120, "how": 150, "ref": 80}
"""Lines of a page outside of code, tables and generated parts, by folder."""
MOST_WORDS = 30
WORN = re.compile(
    r"\b(simply|just|easily|obviously|of course|leverage\w*|seamless\w*|is one that)\b",
    re.IGNORECASE,
)
PAGES = [p for folder in LIMITS for p in sorted((DOCS / folder).glob("*.md"))]
ADDRESSED = [p for p in PAGES if p.parent.name in ("learn", "do", "extend")]

# Reference and explanation that was written before these rules. Pages leave this list, none joins it.
OLDER = {"how/attention.md", "ref/plugins.md", "ref/structured-output.md", "ref/cli.md"}


def name(page: Path) -> str:
    return page.relative_to(DOCS).as_posix()


def written(page: Path) -> str:
    """What somebody wrote on the page: without front matter, code and generated parts."""
    text = re.sub(r"\A---\n.*?\n---\n", "", page.read_text(), flags=re.DOTALL)
    text = re.sub(r"<!-- generated: .*?<!-- end generated -->", "", text, flags=re.DOTALL)
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)


def sentences(page: Path) -> Iterator[str]:
    """The sentences of paragraphs and lists. Code and the targets of links count as one word."""
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[*-]|\d+\.) )", written(page)):
        if re.match(r"\s*(#|\||!!!|<)", block):
            continue
        text = re.sub(r"`[^`]+`", "CODE", block)
        text = re.sub(r"\]\([^)]+\)", "]", text)
        yield from re.split(r"(?<=[.:?!])\s+", " ".join(text.split()))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_is_no_longer_than_one_question(page: Path) -> None:
    lines = [line for line in written(page).splitlines() if line.strip() and line[0] != "|"]
    assert len(lines) <= LIMITS[page.parent.name], "two questions are two pages"


@pytest.mark.parametrize("page", [p for p in PAGES if name(p) not in OLDER], ids=name)
def test_sentences_are_short(page: Path) -> None:
    assert [s for s in sentences(page) if len(s.split()) > MOST_WORDS] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_worn_words_are_not_used(page: Path) -> None:
    assert [match[0] for match in WORN.finditer(written(page))] == []


@pytest.mark.parametrize("page", ADDRESSED, ids=name)
def test_tutorials_and_how_tos_address_the_reader(page: Path) -> None:
    text = re.sub(r"`[^`]+`", "", written(page))
    assert re.search(r"\byou(r|rs)?\b", text, re.IGNORECASE)
    assert ";" not in "".join(s for s in sentences(page)), "make two sentences of it"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_begins_with_what_it_is_for(page: Path) -> None:
    text = written(page).strip()
    assert len(re.findall(r"^# ", text, re.MULTILINE)) == 1
    first = text.split("\n\n")[1]
    assert not first.startswith(("#", "|")), "the first paragraph says what the reader can do"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_diagram_has_words_for_those_who_cannot_see_it(page: Path) -> None:
    text = page.read_text()
    for block in re.finditer(r"^```mermaid\n.*?^```\n\n(.*)", text, re.MULTILINE | re.DOTALL):
        caption = block[1].split("\n\n")[0]
        assert re.match(r"\*[^*]+\.?\*", caption), "a caption in italics follows"
        assert len(caption.split()) > 25, "the text says what the diagram shows"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_project_is_written_in_one_way(page: Path) -> None:
    """*treadle* in a sentence, *Treadle* where one begins."""
    for sentence in sentences(page):
        assert not re.search(r"(?<=[a-z,] )Treadle\b", sentence), sentence


def test_the_list_of_older_pages_has_no_page_that_could_leave_it() -> None:
    fine = [
        page for page in OLDER if all(len(s.split()) <= MOST_WORDS for s in sentences(DOCS / page))
    ]
    assert fine == []


def test_few_examples_are_not_run() -> None:
    """What needs a GPU, a cluster, a download or an open port is not. Everything else is."""
    every = [b for p in pages() for b in blocks(p) if b.language in ("bash", "python")]
    assert sum(b.skipped for b in every) <= len(every) // 5
