"""The files of the page at ``/ui``, as a browser gets them."""

from __future__ import annotations

import asyncio
import re
from importlib.resources import files
from pathlib import Path

from treadle_web_ui.routes import static_files

from treadle.testing.plugin import PluginSuite
from treadle_server.testing.client import ask
from treadle_server.testing.plugins import KEY, ServerSuite

STATIC = {file.path: file for file in static_files()}
METRICS = Path(__file__).parents[3] / "docs" / "ref" / "metrics.md"
SERIES = ("_count", "_sum", "_bucket")


class TestWebUi(PluginSuite, ServerSuite):
    plugin = "server:web_ui"

    def test_a_browser_gets_the_page_without_a_key(self) -> None:
        async def main() -> None:
            async with self.running(self.server(api_key=[KEY])) as gateway:
                root = await ask(gateway, "GET", "/", headers={"accept": "text/html,*/*;q=0.8"})
                assert (root.status, root.headers["location"]) == (307, "./ui")
                for path, file in STATIC.items():
                    answer = await ask(gateway, "GET", path)
                    assert (answer.status, answer.body) == (200, file.content), path
                    assert answer.headers["content-type"].startswith(file.media_type)
                    assert "default-src 'none'" in answer.headers["content-security-policy"]
                    again = {"if-none-match": answer.headers["etag"]}
                    assert (await ask(gateway, "GET", path, headers=again)).status == 304
                for data in ("/v1/models", "/metrics", "/plugins"):
                    assert (await ask(gateway, "GET", data)).status == 401

        asyncio.run(main())

    def test_other_clients_and_a_proxys_prefix(self) -> None:
        async def main() -> None:
            async with self.running(self.server(root_path="/llm")) as gateway:
                plain = await ask(gateway, "GET", "/llm/", headers={"accept": "*/*"})
                page = await ask(gateway, "GET", "/llm/", headers={"accept": "text/html"})
            assert plain.status == 200 and b"openapi.json" in plain.body
            assert page.headers["location"] == "/llm/ui"

        asyncio.run(main())


def test_what_a_file_refers_to_is_there_and_nothing_is_elsewhere() -> None:
    for path, file in STATIC.items():
        text = file.content.decode()
        names = re.findall(r'(?:href|src)="(?!#)([^"]+)"', text) if path == "/ui" else []
        names += [f"ui/{name}" for name in re.findall(r'from "\./([^"]+)"', text)]
        assert [name for name in names if f"/{name}" not in STATIC] == [], path
        elsewhere = re.findall(r"https?://(?!www\.w3\.org/2000/svg)[\w.]+", text)
        assert elsewhere == [], path
        assert "innerHTML" not in text, "text of a model must never become HTML"
        assert " style=" not in text and "onclick=" not in text, "the policy forbids it"


def test_the_metrics_that_it_shows_exist() -> None:
    text = files("treadle_web_ui").joinpath("static/engine.js").read_text()
    known = set(re.findall(r"`treadle_(\w+)`", METRICS.read_text()))
    calls = r"(?:value|values|rate|rates|all|sum)\(\"(\w+)\"|latency\(\"[^\"]+\", \"(\w+)\""
    used = {a or b for a, b in re.findall(calls, text)}
    for suffix in SERIES:
        used = {name.removesuffix(suffix) for name in used}
    assert len(used) > 15
    assert used - known == set()
