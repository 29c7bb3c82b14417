"""``treadle plugin index``: what is installed as a page, with the results of the suites."""

from __future__ import annotations

import json
from email.message import Message
from html.parser import HTMLParser
from importlib import metadata

import pytest

NEUTRAL = "a-distribution-that-nobody-has"


class Page(HTMLParser):
    """The tags of a page, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture
def foreign(tmp_path, monkeypatch):
    """Installs a distribution whose metadata are hostile to a web page."""
    info = tmp_path / "site" / "treadle_evil-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.4\nName: treadle-evil\nVersion: 1.0\n"
        "Summary: <script>alert(1)</script>\nLicense-Expression: MIT\n"
        "Project-URL: Home, javascript:alert(1)\nProject-URL: Source, https://example.org/?a=1&b=2\n"
        "Requires-Dist: treadle-core<0.2,>=0.1\n"
    )
    (info / "entry_points.txt").write_text(
        "[treadle.scheduling_policies]\nevil = treadle_evil\n"
        "[treadle.tool_parsers.v9]\nlater = treadle_evil\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "site"))


def test_the_index_lists_kinds_generations_and_what_is_wrong(treadle, foreign, tmp_path):
    folder = tmp_path / "out"
    result = treadle("plugin", "index", "Treadle_Evil", "--folder", str(folder))
    assert result.code == 0 and "1 distributions" in result.out
    (dist,) = json.loads((folder / "index.json").read_text())
    assert (dist["name"], dist["version"], dist["license"]) == ("treadle-evil", "1.0", "MIT")
    assert (dist["core"], dist["url"]) == ("<0.2,>=0.1", "https://example.org/?a=1&b=2")
    found = {
        p["key"]: (p["kind"], p["generation"], p["state"], p["suite"]) for p in dist["plugins"]
    }
    assert found["evil"] == ("scheduling_policies", 1, "ready", "not run")
    assert found["later"] == ("tool_parsers", 9, "incompatible", "not run")


def test_the_page_trusts_no_metadata(treadle, foreign, tmp_path):
    treadle("plugin", "index", "treadle-evil", "--folder", str(tmp_path / "out"))
    page = Page((tmp_path / "out/index.html").read_text())
    assert "<script>alert(1)</script>" in page.text
    assert "script" not in {tag for tag, _ in page.tags}
    links = [attributes.get("href") for tag, attributes in page.tags if tag == "a"]
    assert links == ["index.json", "https://example.org/?a=1&b=2"]
    assert "speaks tool_parsers v9" in page.text


@pytest.mark.parametrize(("text", "result"), [("return P()", "passes"), ("return 1", "fails")])
def test_the_suites_are_run(treadle, tmp_path, text, result):
    file = tmp_path / "mine.py"
    file.write_text(
        "from treadle.scheduler.policies import FirstCome as P\nfrom treadle.api import impl\n"
        'TREADLE = {"scheduling_policies": ["mine"]}\n@impl\ndef treadle_scheduling_policy(name):\n'
        f'    if name == "mine":\n        {text}\n'
    )
    options = ["--plugin-file", str(file), "--folder", str(tmp_path / "out"), "--test"]
    treadle("plugin", "index", "mine.py", *options)
    (dist,) = json.loads((tmp_path / "out/index.json").read_text())
    assert [plugin["suite"] for plugin in dist["plugins"]] == [result]


def test_a_distribution_that_is_not_installed_is_named(treadle, tmp_path):
    result = treadle("plugin", "index", NEUTRAL, "--folder", str(tmp_path / "out"))
    assert result.code == 2 and f"no plugins come from {NEUTRAL}; install" in result.err
    assert not (tmp_path / "out").exists()


def test_a_field_that_is_missing(treadle, tmp_path, monkeypatch):
    """importlib_metadata, which replaces Python's own reader where it is imported, has no default."""

    def read(self: Message, name: str) -> str:
        if name not in self:
            raise KeyError(name)
        return str(self.get(name))

    (distribution,) = metadata.distributions(name="treadle-core")
    monkeypatch.setattr(type(distribution.metadata), "__getitem__", read)
    treadle("plugin", "index", "treadle-core", "--folder", str(tmp_path))
    (dist,) = json.loads((tmp_path / "index.json").read_text())
    assert dist["summary"] and dist["url"] == ""


def test_a_folder_that_cannot_be_written(treadle, tmp_path):
    (tmp_path / "file").touch()
    result = treadle("plugin", "index", "treadle-core", "--folder", str(tmp_path / "file"))
    assert result.code == 2 and "cannot be written" in result.err
