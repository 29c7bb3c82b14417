"""``treadle batch`` and ``treadle run`` with a real engine: files of requests, and of prompts."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from treadle_cli.offline import progress_bar

pytestmark = pytest.mark.early

SMALL = ("--kv-cache-memory-bytes", "10000000", "--cpu-threads", "1", "--served-model-name", "m")
LIMIT = 10 * 2**20


@pytest.fixture
def texts(checkpoint):
    """What the library says to ``Hello`` and ``Bye`` in 12 greedy tokens."""
    from treadle import LLM, SamplingParams

    with LLM(model=checkpoint, kv_cache_memory_bytes=10_000_000, cpu_threads=1) as llm:
        params = SamplingParams(temperature=0, max_tokens=12)
        return [r.outputs[0].text for r in llm.generate(["Hello", "Bye"], params, use_tqdm=False)]


def request(custom_id, url="/v1/completions", **body):
    body = {"prompt": "Hello", "max_tokens": 12, "temperature": 0} | body
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def rows(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_every_line_has_an_answer_and_nothing_is_done_twice(treadle, checkpoint, texts):
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    lines = [
        json.dumps(request("hello")).encode(),
        b"{",
        json.dumps(request("bye", prompt="Bye")).encode(),
        json.dumps(request("hello", prompt="again")).encode(),
        json.dumps(request("chat", "/v1/chat/completions", **chat) | {"method": "GET"}).encode(),
        json.dumps(request("embed", "/v1/embeddings")).encode(),
        json.dumps(request("model", model="gpt-9")).encode(),
        json.dumps(request("value", temperature=-1)).encode(),
        json.dumps(request("ü")).encode() + b"\xff",
        b'{"custom_id":"long","body":"' + b"x" * LIMIT + b'"}',
        json.dumps(request("response", "/v1/responses", input="x", prompt=None)).encode(),
    ]
    Path("in.jsonl").write_bytes(b"\n".join(lines))
    arguments = ("batch", checkpoint, *SMALL, "-i", "in.jsonl", "-o", "out.jsonl")
    result = treadle(*arguments)
    assert result == (0, "", "3 completed, 8 failed, of 11 requests\n")
    output = rows("out.jsonl")
    by_id = {row["custom_id"]: row for row in output if row["response"]}
    answers = {id: row["response"]["body"] for id, row in by_id.items()}
    assert [answers[id]["choices"][0]["text"] for id in ("hello", "bye")] == texts
    assert answers["response"]["object"] == "response"
    assert {id: by_id[id]["response"]["status_code"] for id in ("model", "value")} == {
        "model": 404,
        "value": 400,
    }
    errors = {row["error"]["line"]: row["error"]["code"] for row in output if row["error"]}
    assert errors == {
        2: "invalid_json_line",
        4: "duplicate_custom_id",
        5: "invalid_method",
        6: "invalid_url",
        9: "invalid_json_line",
        10: "line_too_long",
    }
    content = Path("out.jsonl").read_bytes()
    assert treadle("run-batch", *arguments[1:]) == result, "by vLLM's name, and nothing left to do"
    assert Path("out.jsonl").read_bytes() == content


@pytest.mark.own_python
def test_it_continues_after_ctrl_c_and_kill_9(treadle, checkpoint, tmp_path):
    count = 120
    lines = [json.dumps(request(str(i), max_tokens=40, ignore_eos=True)) for i in range(count)]
    Path("in.jsonl").write_text("\n".join(lines))
    arguments = ("batch", checkpoint, *SMALL, "--max-num-seqs", "2")
    arguments = (*arguments, "-i", "in.jsonl", "-o", "out.jsonl")
    output, kept = tmp_path / "out.jsonl", b""
    for number in (signal.SIGINT, signal.SIGKILL):
        process = subprocess.Popen(
            [sys.executable, "-m", "treadle_cli", *arguments],
            stderr=subprocess.PIPE,
            # A shell starts what it runs in the background with SIGINT ignored.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
        while not output.exists() or output.stat().st_size <= len(kept):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.005)
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
        assert process.returncode in (130, -signal.SIGKILL) and b"Traceback" not in errors
        assert (number == signal.SIGINT) == (b"completed, 0 failed, of 120" in errors)
        content = output.read_bytes()
        assert content.startswith(kept)
        kept = content[: content.rfind(b"\n") + 1]
        assert 0 < kept.count(b"\n") < count
    with output.open("ab") as file:
        file.write(b'{"id":"batch_req_17","custom_id":')
    assert treadle(*arguments) == (0, "", "120 completed, 0 failed, of 120 requests\n")
    assert output.read_bytes().startswith(kept)
    assert sorted(row["custom_id"] for row in rows(output)) == sorted(map(str, range(count)))


def test_files_that_cannot_be_used(treadle):
    Path("in.jsonl").write_text(json.dumps(request("a")))
    Path("empty.jsonl").write_text("\n\n")
    Path("notes.txt").write_text("mine")
    for arguments, message in (
        ((), "give the requests with -i"),
        (("-i", "in.jsonl"), "and the answers with -o"),
        (("-i", "nope.jsonl", "-o", "x"), "nope.jsonl: No such file"),
        (("-i", "empty.jsonl", "-o", "x"), "has no request"),
        (("-i", "in.jsonl", "-o", "nope/x"), "nope/x: No such file"),
        (("-i", "in.jsonl", "-o", "notes.txt"), "notes.txt cannot be continued"),
        (("-i", "in.jsonl", "-o", "in.jsonl"), "in.jsonl cannot be continued"),
    ):
        result = treadle("batch", *arguments)
        assert (result.code, result.out) == (2, "")
        assert message in result.err and result.err.count("\n") == 1
    assert Path("notes.txt").read_text() == "mine"
    assert json.loads(Path("in.jsonl").read_text())["custom_id"] == "a"


def test_run_completes_a_file_of_prompts(treadle, checkpoint, texts):
    Path("prompts.txt").write_text("Hello\n\nBye\n")
    greedy = ("--temperature", "0", "--max-tokens", "12")
    result = treadle("run", checkpoint, "prompts.txt", *SMALL, *greedy)
    assert (result.code, result.err) == (0, "")
    printed = {row["line"]: row["text"] for row in map(json.loads, result.out.splitlines())}
    assert printed == {1: texts[0], 3: texts[1]}

    lines = [
        {"prompt": "Hello", "n": 2},
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3},
        {"prompt": "x", "messages": []},
        {"prompt": "x", "top_p": 7},
    ]
    Path("prompts.jsonl").write_text("\n".join([*map(json.dumps, lines), "plain"]))
    result = treadle("run", checkpoint, "prompts.jsonl", *SMALL, *greedy, "--logprobs", "1")
    printed = sorted(map(json.loads, result.out.splitlines()), key=lambda row: row["line"])
    assert [row["line"] for row in printed] == [1, 1, 2, 3, 4, 5]
    assert [row["text"] for row in printed[:2]] == [texts[0]] * 2
    assert len(printed[2]["logprobs"]["content"]) <= 3 and printed[2]["message"]["content"]
    assert "either prompt or messages" in printed[3]["error"]
    assert "top_p" in printed[4]["error"] and "not valid JSON" in printed[5]["error"]


def test_chats_of_files_have_budgets(treadle):
    """A flag is for every line; a text has no thought that could have one."""
    messages = [{"role": "user", "content": "What is 12 plus 30?"}]
    chat = {"messages": messages, "chat_template_kwargs": {"enable_thinking": True}}
    lines = [chat | {"thinking_token_budget": 1000}, chat, {"prompt": "x"}]
    Path("prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    arguments = (*SMALL, "--temperature", "0", "--thinking-token-budget", "3")
    result = treadle("run", "prompts.jsonl", *arguments)
    printed = sorted(map(json.loads, result.out.splitlines()), key=lambda row: row["line"])
    free, cut = (row["message"] for row in printed[:2])
    assert "42" in free["content"] and "42" in cut["content"]
    assert len(cut.get("reasoning") or "") < len(free["reasoning"])
    assert "thinking_token_budget is for chats" in printed[2]["error"]

    line = request("a", "/v1/chat/completions", **lines[1], thinking_token_budget=0, max_tokens=99)
    Path("in.jsonl").write_text(json.dumps(line | {"body": line["body"] | {"prompt": None}}))
    assert treadle("batch", *SMALL, "-i", "in.jsonl", "-o", "out.jsonl").code == 0
    (answer,) = rows("out.jsonl")
    message = answer["response"]["body"]["choices"][0]["message"]
    assert "42" in message["content"] and not (message.get("reasoning") or "").strip()


def test_run_needs_a_file(treadle, tmp_path):
    (tmp_path / "empty").write_text("")
    for arguments, message in (
        ((), "there is no file of prompts"),
        (("nope.txt",), "nope.txt cannot be read"),
        (("demo:treadle-demo", "empty"), "empty is empty"),
        (("empty", "--temperature", "-1"), "temperature is -1"),
    ):
        result = treadle("run", *arguments)
        assert result.code == 2 and message in result.err and result.err.count("\n") == 1


def test_progress_is_shown_on_a_terminal_only(monkeypatch):
    for is_terminal in (True, False):
        stream = io.StringIO()
        stream.isatty = lambda value=is_terminal: value
        monkeypatch.setattr("sys.stderr", stream)
        with progress_bar("requests") as bar:
            bar.total = 4
            bar.update(4)
        assert ("4/4" in stream.getvalue()) == is_terminal == bool(stream.getvalue())
