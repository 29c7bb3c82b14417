"""A parser's bug is repaired under load, in a real ``treadle serve``, and no request fails."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from process import Process, served

KEY = "boss"
CLIENTS = 3
LONG = 450
"""Tokens of a request that outlives the exchange."""
MODULE = '''
"""The tool calls of the demo model, by somebody in a hurry."""

import json
import re

from treadle.api.hookspecs import impl
from treadle.api.parsers import TextDelta, ToolCallDelta


class Parser:
    def __init__(self):
        self.text = ""

    def feed(self, text, ids):
        self.text += text
        return []

    def finish(self):
        before, _, call = self.text.partition("<tool_call>")
        deltas = [TextDelta(before + "(VERSION)")]
        CODE
        return deltas

    def grammar_for_tool_choice(self, choice):
        return None


@impl
def treadle_tool_parser(name):
    return Parser()
'''
RAISES = "if call: raise KeyError('name')"
DROPS = "pass  # a call? which call?"
RIGHT = """if call:
            found = json.loads(call.partition("</tool_call>")[0])
            deltas.append(ToolCallDelta(0, found["name"], json.dumps(found["arguments"])))
"""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather for a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
    "tools": TOOLS,
    "temperature": 0,
    "stream": True,
}


def install(folder: Path, version: str, code: str) -> None:
    """Replace the distribution, as pip would."""
    for old in folder.glob("hasty*"):
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    info = folder / f"hasty_parser-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: hasty-parser\nVersion: {version}\nRequires-Dist: treadle-core\n"
    )
    (info / "entry_points.txt").write_text("[treadle.tool_parsers]\nhasty = hasty_parser\n")
    source = MODULE.replace("CODE", code).replace("VERSION", version)
    (folder / "hasty_parser.py").write_text(source)


@dataclass
class Answer:
    """One streamed answer, and when it was asked for, began and ended."""

    request_time: float
    first_chunk_time: float = 0.0
    end_time: float = 0.0
    status: int = 0
    content: str = ""
    calls: list[Any] = field(default_factory=list)
    end: str | None = None
    complete: bool = False
    comments: str = ""


def ask(url: str, begun: threading.Event | None = None, **fields: Any) -> Answer:
    answer = Answer(time.monotonic())
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=BODY | fields, timeout=60) as r:
        answer.status = r.status_code
        for line in r.iter_lines():
            if line.startswith(":"):
                answer.comments += line
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                answer.complete = True
                break
            answer.first_chunk_time = answer.first_chunk_time or time.monotonic()
            if begun is not None:
                begun.set()
            (choice,) = json.loads(line[6:])["choices"]
            answer.content += choice["delta"].get("content") or ""
            answer.calls += choice["delta"].get("tool_calls") or []
            answer.end = choice["finish_reason"]
    answer.end_time = time.monotonic()
    return answer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("site")


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    install(folder, "1.0", DROPS)
    log = tmp_path_factory.mktemp("log") / "server.log"
    options = ("--tool-call-parser", "hasty", "--admin-api-key", KEY, "--served-model-name", "demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        with served(Path("demo:treadle-demo"), log, *options) as process:
            yield process


def reload(server: Process) -> httpx.Response:
    key = {"authorization": f"Bearer {KEY}"}
    return server.client.post("/plugins/tool_parsers:hasty/reload", headers=key)


@pytest.mark.parametrize(("bug", "version"), [(DROPS, "1"), (RAISES, "3")])
def test_a_bug_is_repaired_under_load(
    bug: str, version: str, server: Process, folder: Path
) -> None:
    old, new = f"{version}.0", f"{version}.1"
    install(folder, old, bug)
    assert reload(server).status_code == 200
    stop, begun = threading.Event(), threading.Event()
    answers: list[Answer] = []

    def client() -> None:
        while not stop.is_set():
            answers.append(ask(server.url))

    with ThreadPoolExecutor(CLIENTS + 1) as pool:
        clients = [pool.submit(client) for _ in range(CLIENTS)]
        while len(answers) < CLIENTS:  # of the old parser
            assert not any(c.done() for c in clients)
            time.sleep(0.01)
        # It does not end by itself: only the limit ends it, long after the exchange.
        lasting = pool.submit(ask, server.url, begun, ignore_eos=True, max_tokens=LONG)
        assert begun.wait(30)
        install(folder, new, RIGHT)
        send_time = time.monotonic()
        reply = reload(server)
        end_time = time.monotonic()
        assert reply.status_code == 200, reply.text
        assert not lasting.done()
        num_seen = len(answers)
        while len([a for a in answers[num_seen:] if a.request_time > end_time]) < CLIENTS:
            assert not any(c.done() for c in clients)
            time.sleep(0.01)
        stop.set()
        for future in clients:
            future.result()
        answers.append(lasting.result())

    assert all(a.status == 200 and a.complete and a.end for a in answers)
    before = [a for a in answers if a.first_chunk_time and a.first_chunk_time < send_time]
    after = [a for a in answers if a.request_time > end_time]
    assert before[-1] is answers[-1] and answers[-1].end_time > end_time
    for answer in before:
        assert not answer.calls and new not in answer.content
        assert ("parser-error" in answer.comments) == (bug is RAISES)
    for answer in after:
        assert answer.content == f"({new})" and answer.end == "tool_calls" and not answer.comments
        (call,) = answer.calls
        assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    assert len(before) > CLIENTS and len(after) >= CLIENTS
