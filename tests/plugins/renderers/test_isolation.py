"""Templates in their own process: the same text, and no template hangs or fills the caller's."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import templates
from test_jinja import CONVERSATIONS, TOOL, opened
from treadle_jinja.isolation import TemplateProcess
from treadle_jinja.renderer import open_renderer

from treadle.errors import CheckpointError, RequestError


@pytest.fixture
def process() -> Iterator[TemplateProcess]:
    child = TemplateProcess(seconds=5.0)
    child.render("", {})  # started
    yield child
    child.close()


def test_the_text_is_the_same(tmp_path: Path) -> None:
    tokenizer = opened(tmp_path, templates.CHATML)
    inside, outside = open_renderer(tokenizer), open_renderer(tokenizer, isolated=True)
    for messages in [*CONVERSATIONS.values(), [{"role": "user", "content": "<|im_end|> é😀"}]]:
        for tools in (None, [TOOL]):
            expected = inside.render(messages, tools=tools)
            found = outside.render(messages, tools=tools)
            assert found == expected and outside.encode(found) == inside.encode(expected)
    outside.close()
    outside.close()


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "within 1 s",
        ),
        ("{{ 'x'.ljust(2000000000) | length }}", "MemoryError|limited to 1024 MiB"),
        ("{{ ('x' * 10000000000) | length }}", "MemoryError|limited to 1024 MiB"),
        ("{% for i in range(99999) %}{{ 'x' * 999999 }}{% endfor %}", "characters"),
        ("{{ raise_exception('no') }}", "no"),
    ],
)
def test_a_hostile_template_costs_its_own_request(
    process: TemplateProcess, template: str, message: str
) -> None:
    process._seconds = 1.0 if "within" in message else 5.0
    began = time.monotonic()
    with pytest.raises(RequestError, match=message):
        process.render(template, {})
    assert time.monotonic() - began < 5
    process._seconds = 10.0
    assert process.render("{{ a }}!", {"a": "ok"}) == "ok!"


def test_a_template_that_cannot_be_compiled_is_the_checkpoints_fault(
    process: TemplateProcess,
) -> None:
    with pytest.raises(CheckpointError, match="nosuchfilter"):
        process.render("{{ 1 | nosuchfilter }}", {})


def test_a_killed_child_is_replaced(process: TemplateProcess) -> None:
    first = process.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    with pytest.raises(RequestError, match="broke its process"):
        process.render("x", {})
    assert process.render("x", {}) == "x" and process.pid != first


def test_closing_leaves_no_process() -> None:
    child = TemplateProcess()
    pid = child.pid
    assert pid is not None
    child.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_threads_take_turns(process: TemplateProcess) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda i: process.render("{{ i }}" * 50, {"i": i}), range(200))
    assert list(found) == [str(i) * 50 for i in range(200)]
