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
from test_jinja import CONVERSATIONS, TOOL, open_tokenizer
from treadle_jinja.isolation import TemplateProcesses
from treadle_jinja.renderer import open_renderer

from treadle.errors import CheckpointError, OutOfMemoryError, RequestError
from treadle_server.errors import error_of


@pytest.fixture
def process() -> Iterator[TemplateProcesses]:
    child = TemplateProcesses(seconds=5.0)
    child.render("", {})  # started
    yield child
    child.close()


def test_the_text_is_the_same(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(tmp_path, templates.CHATML)
    local, isolated = open_renderer(tokenizer), open_renderer(tokenizer, isolated=True)
    for messages in [*CONVERSATIONS.values(), [{"role": "user", "content": "<|im_end|> é😀"}]]:
        for tools in (None, [TOOL]):
            expected = local.render(messages, tools=tools)
            actual = isolated.render(messages, tools=tools)
            assert actual == expected and isolated.encode(actual) == local.encode(expected)
    isolated.close()
    isolated.close()


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
    process: TemplateProcesses, template: str, message: str
) -> None:
    process._seconds = 1.0 if "within" in message else 5.0
    start_time = time.monotonic()
    with pytest.raises(RequestError, match=message):
        process.render(template, {})
    assert time.monotonic() - start_time < 30
    process._seconds = 10.0
    assert process.render("{{ a }}!", {"a": "ok"}) == "ok!"


def test_a_template_that_cannot_be_compiled_is_the_checkpoints_fault(
    process: TemplateProcesses,
) -> None:
    with pytest.raises(CheckpointError, match="nosuchfilter"):
        process.render("{{ 1 | nosuchfilter }}", {})


def test_a_killed_child_is_replaced(process: TemplateProcesses) -> None:
    """The next chat is not blamed for what others did."""
    (first,) = process.pids
    assert first is not None
    os.kill(first, signal.SIGKILL)
    assert process.render("x", {}) == "x" and process.pids != [first]


def test_a_child_that_others_kill_again_is_not_the_clients_fault(
    process: TemplateProcesses,
) -> None:
    process._seconds = 60.0
    killed: set[int] = set()
    with ThreadPoolExecutor(1) as pool:
        slow = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
        rendering = pool.submit(process.render, slow, {})
        while not rendering.done():
            (pid,) = process.pids
            if pid is not None and pid not in killed:
                killed.add(pid)
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
    assert isinstance(rendering.exception(), OutOfMemoryError)
    assert len(killed) in (2, 3)  # the first may have been killed before the rendering began
    assert error_of(rendering.exception()).status == 503
    assert process.render("x", {}) == "x"


def test_closing_leaves_no_process() -> None:
    child = TemplateProcesses()
    child.start()
    (pid,) = child.pids
    assert pid is not None
    child.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_threads_take_turns(process: TemplateProcesses) -> None:
    with ThreadPoolExecutor(8) as pool:
        results = pool.map(lambda i: process.render("{{ i }}" * 50, {"i": i}), range(200))
    assert list(results) == [str(i) * 50 for i in range(200)]


def test_a_slow_template_does_not_hold_up_others() -> None:
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    processes = TemplateProcesses(seconds=60.0)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(processes.render, endless, {})
        try:
            while processes._idle.qsize():
                time.sleep(0.001)
            for _ in range(3):
                assert processes.render("{{ a }}!", {"a": "ok"}) == "ok!"
            assert not slow.done() and len(processes.pids) == 2
        finally:
            processes.close()
        with pytest.raises(OutOfMemoryError):  # it was killed, and its client is not to blame
            slow.result()
