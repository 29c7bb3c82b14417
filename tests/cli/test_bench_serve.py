"""``treadle bench serve``: prompts, arrivals, figures, and whole runs against a server."""

from __future__ import annotations

import json
import statistics
import threading
from itertools import pairwise

import pytest
from fake_server import fake_server

from treadle.errors import ConfigError
from treadle_cli.bench.serve.config import ServeBenchConfig
from treadle_cli.bench.serve.datasets import Prompt, WordCost, prompts
from treadle_cli.bench.serve.load import arrivals, body_of
from treadle_cli.bench.serve.measure import Record, parse_goodput, summarize_run
from treadle_cli.bench.serve.plot import check_plot


def config(**options):
    return ServeBenchConfig(**options)


# -- prompts -------------------------------------------------------------------------------


def test_random_prompts_have_the_length_that_the_server_counts():
    cost = WordCost(per_word=2.0, per_request=10.0)
    made = prompts(config(num_prompts=5, input_len=110, output_len=7), cost)
    assert [len(p.text.split()) for p in made] == [50] * 5 and {p.output_len for p in made} == {7}
    assert len({p.text for p in made}) == 5, "no prompt is in the cache already"
    assert made == prompts(config(num_prompts=5, input_len=110, output_len=7), cost)


def test_random_lengths_vary_and_prefixes_are_shared():
    options = {"input_len": 100, "output_len": 40, "random_range_ratio": 0.5}
    made = prompts(config(random_prefix_len=20, **options), WordCost())
    lengths = [len(p.text.split()) for p in made]
    assert 50 <= min(lengths) < 70 and 130 < max(lengths) <= 150
    assert min(p.output_len for p in made) >= 20 and max(p.output_len for p in made) <= 60
    assert len({tuple(p.text.split()[:20]) for p in made}) == 1
    with pytest.raises(ConfigError, match="random_prefix_len is 100, part of input_len 100"):
        prompts(config(random_prefix_len=100, input_len=100), WordCost())


SHAREGPT = [
    {"conversations": [{"value": "Why?"}, {"value": "x" * 80}, {"value": "more"}]},
    {"conversations": [{"value": "alone"}]},
]


@pytest.mark.parametrize(
    ("name", "file", "content", "expected"),
    [
        ("sharegpt", "s.json", json.dumps(SHAREGPT), {Prompt("Why?", 20)}),
        ("custom", "p.txt", "one\n\ntwo\n", {Prompt("one", 128), Prompt("two", 128)}),
        ("custom", "p.jsonl", '{"prompt": "a", "output_tokens": 3}\n', {Prompt("a", 3)}),
    ],
)
def test_prompts_of_a_file(tmp_path, name, file, content, expected):
    (tmp_path / file).write_text(content)
    options = {"dataset_name": name, "dataset_path": str(tmp_path / file), "num_prompts": 5}
    assert len(prompts(config(**options), WordCost())) == 5
    assert set(prompts(config(**options), WordCost())) == expected
    assert {p.output_len for p in prompts(config(output_len=9, **options), WordCost())} == {9}


def test_lines_of_a_poem(tmp_path):
    (tmp_path / "sonnet.txt").write_text("Shall I compare thee\n\nto a summer's day\n")
    options = {"dataset_name": "sonnet", "dataset_path": str(tmp_path / "sonnet.txt")}
    for prompt in prompts(config(input_len=60, **options), WordCost()):
        assert 60 <= len(prompt.text.split()) <= 64 and "compare thee\n" in prompt.text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("sharegpt", "{", "is not JSON"),
        ("sharegpt", "[]", "has no prompt"),
        ("custom", '{"text": 1}', "has no text in prompt"),
        ("sonnet", "\n", "has no line"),
        ("sonnet", None, "cannot be read"),
    ],
)
def test_a_file_without_prompts_is_refused(tmp_path, name, content, message):
    file = tmp_path / "x.jsonl"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        prompts(config(dataset_name=name, dataset_path=str(file)), WordCost())


def test_a_dataset_needs_its_file():
    with pytest.raises(ConfigError, match="sharegpt is a file; give --dataset-path"):
        prompts(config(dataset_name="sharegpt"), WordCost())


# -- arrivals ------------------------------------------------------------------------------


def test_without_a_rate_all_begin_at_once():
    assert arrivals(config(), 3) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("burstiness", "low", "high"), [(1.0, 0.9, 1.1), (0.25, 1.7, 2.3), (100.0, 0.0, 0.15)]
)
def test_gaps_have_the_rate_and_the_shape(burstiness, low, high):
    """The deviation of a gamma distribution over its mean is one over the root of its shape."""
    times = arrivals(config(request_rate=20.0, burstiness=burstiness), 2001)
    gaps = [b - a for a, b in pairwise(times)]
    assert times[-1] == pytest.approx(100.0) and times == sorted(times)
    assert low < statistics.pstdev(gaps) * 20 < high
    assert times == arrivals(config(request_rate=20.0, burstiness=burstiness), 2001)


# -- figures -------------------------------------------------------------------------------


def record(start, first, last, tokens, error=None):
    made = Record(due=start, start=start, output_tokens=tokens, prompt_tokens=10, error=error)
    made.arrived(first)
    for i in range(1, tokens):
        made.arrived(first + (last - first) * i / (tokens - 1))
    made.end = last
    return made


LABELS = {
    "date": "", "base_url": "", "model": "", "endpoint": "", "dataset": "", "request_rate": None,
    "burstiness": 1.0, "max_concurrency": None, "client": None,
}  # fmt: skip


def test_figures():
    """A token has the time of its event, and one token has no time per token."""
    records = [
        record(0.0, 0.1, 0.5, 5),
        record(0.2, 0.5, 0.7, 2),
        record(0.6, 0.9, 0.9, 1),
        record(0.6, 0.7, 0.8, 2, error="broken"),
    ]
    result = summarize_run(records, 2.0, {"ttft": 250, "tpot": 150}, **LABELS)
    assert (result.requests, result.completed, result.errors) == (4, 3, {"broken": 1})
    assert (result.prompt_tokens, result.output_tokens) == (30, 8)
    assert (result.output_tokens_per_second, result.total_tokens_per_second) == (4.0, 19.0)
    assert (result.ttft_ms.p50, result.ttft_ms.max) == (300, 300)
    assert (result.tpot_ms.mean, result.tpot_ms.max) == (150, 200)
    assert result.itl_ms.mean == pytest.approx((4 * 100 + 200) / 5)
    assert (result.e2el_ms.p50, result.peak_concurrency) == (500, 3)
    assert (result.goodput.requests, result.goodput.requests_per_second) == (1, 0.5)


def test_objectives():
    assert parse_goodput(["ttft:200 tpot:50", "e2el:1.5"]) == {"ttft": 200, "tpot": 50, "e2el": 1.5}
    for text in ("ttft", "ttft:", "itl:3", "ttft:-1", "ttft:0", "ttft:inf", "ttft:nan"):
        with pytest.raises(ConfigError, match="write NAME:MILLISECONDS"):
            parse_goodput([text])


def test_a_request():
    options = config(temperature=0.0, ignore_eos=True, extra_body={"top_k": 3}, endpoint="chat")
    assert body_of(options, "m", Prompt("x", 5)) == {
        "model": "m",
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        "ignore_eos": True,
        "top_k": 3,
    }
    assert body_of(config(), "m", Prompt("x", 5))["prompt"] == "x"


# -- runs ----------------------------------------------------------------------------------

RUN = ("--num-prompts", "6", "--input-len", "9", "--output-len", "4")


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_run(treadle, tmp_path, endpoint):
    with fake_server() as server:
        server.answers = [[{"content": "a"} for _ in range(4)]]
        result = treadle(
            *("bench", "serve", "other", "--base-url", server.url, "--endpoint", endpoint, *RUN),
            *("--max-concurrency", "2", "--header", "x=y", "--api-key", "k", "--num-warmups", "2"),
            *("--goodput", "ttft:60000", "e2el:0.0001", "--result-filename", "r.json"),
        )
    assert result.code == 0, result.err
    line = json.loads(result.out)
    assert (line["completed"], line["output_tokens"], line["prompt_tokens"]) == (6, 24, 42)
    assert (line["model"], line["endpoint"], line["max_concurrency"]) == ("other", endpoint, 2)
    assert 1 <= line["peak_concurrency"] <= 2
    assert line["goodput"]["objectives_ms"] == {"ttft": 60000, "e2el": 0.0001}
    assert line["goodput"]["requests"] == 0
    assert 0 < line["ttft_ms"]["p50"] <= line["e2el_ms"]["p50"] <= line["wall_seconds"] * 1000
    assert line["client"]["readable_tokens_per_second"] > 1000
    assert len(server.bodies) == 2 + 2 + 6, "two to calibrate, two to warm up"
    assert set(server.keys) == {"Bearer k"}
    assert len(json.loads((tmp_path / "r.json").read_text())["records"]) == 6


def test_the_most_at_a_time(treadle):
    """All six requests are sent before one is answered."""
    gate, counted = threading.Event(), []
    with fake_server() as server:
        short = [{"content": "a"}]

        def next_answer():
            counted.append(1)
            if len(counted) == 2 + 1 + 6:
                gate.set()
            return short if len(counted) <= 3 else [gate, {"content": "a"}]

        server.next_answer = next_answer
        result = treadle("bench", "serve", "--base-url", server.url, *RUN)
    assert json.loads(result.out)["peak_concurrency"] == 6


def test_requests_that_fail_are_counted_and_named(treadle):
    with fake_server() as server:
        fine, broken = [{"content": "a"}], ['data: {"error": {"message": "oh"}}\n\n']
        server.answers = [fine, fine, fine, broken, ["data: {\n\n"], ["data: x[DONE]\n\n"], fine]
        result = treadle("bench", "serve", "--base-url", server.url, *RUN)
    assert result.code == 0
    line = json.loads(result.out)
    assert (line["completed"], sum(line["errors"].values())) == (3, 3)
    assert "1 requests failed: the server failed: oh" in result.err


def test_a_server_that_refuses_is_one_line(treadle):
    with fake_server() as server:
        server.status, server.answers = 400, [{"error": {"message": "no such thing"}}]
        result = treadle("bench", "serve", "--base-url", server.url, *RUN)
    assert (result.code, result.out) == (1, "")
    assert "answered 400: no such thing" in result.err and result.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "b"], "there is one MODEL, not 'a b'"),
        (["a", "ttft:3"], "there is one MODEL, not 'a ttft:3'"),
        (["--goodput", "x:1"], "--goodput is 'x:1'"),
        (["--header", "x"], "--header is 'x'; write NAME=VALUE"),
        (["--base-url", "http://127.0.0.1:1"], "cannot be reached"),
        (["--plot", "p.jpg"], "--plot"),
        (["--burstiness", "0"], "option burstiness is 0"),
    ],
)
def test_a_wrong_start_is_one_line(treadle, arguments, message):
    result = treadle("bench", "serve", *arguments)
    assert result.code in (1, 2) and result.out == ""
    assert message in result.err and result.err.count("\n") == 1


def test_a_picture_needs_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="needs matplotlib, which is not installed; pip install"):
        check_plot(tmp_path / "p.png")


def test_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    from treadle_cli.bench.serve.plot import draw

    records = [record(i / 10, i / 10 + 0.1, i / 10 + 0.5, 5) for i in range(20)]
    draw(tmp_path / "p.png", summarize_run(records, 3.0, {}, **LABELS), records)
    assert (tmp_path / "p.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    empty = [Record(error="x")]
    draw(tmp_path / "e.png", summarize_run(empty, 0.0, {}, **LABELS), empty)
