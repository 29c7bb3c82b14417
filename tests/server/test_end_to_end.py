"""A real ``treadle serve`` with a real (tiny) model, and the official client."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from exposition import one, samples
from process import Process, served

pytestmark = pytest.mark.own_python

LINE = re.compile(r"[-\d]+ [:\d]+,\d+ (DEBUG|INFO|WARNING|ERROR) \[\w+\] [\w.]+: ")
HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from treadle.testing.checkpoints import make_checkpoint

    folder = tmp_path_factory.mktemp("tiny")
    return make_checkpoint(folder, tokenizer=True, max_position_embeddings=512)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    log = tmp_path_factory.mktemp("log") / "server.log"
    with served(model, log, "--served-model-name", "tiny", "--api-key", "sesame") as process:
        process.client.headers["authorization"] = "Bearer sesame"
        yield process
        if process.process.poll() is None:
            process.signal(signal.SIGTERM)
        assert process.ends() == 0
        assert "Traceback" not in log.read_text()
        lines = [line for line in log.read_text().splitlines() if line.startswith("20")]
        assert all(LINE.match(line) for line in lines), lines
        assert {"engine", "server"} <= {line.split("[")[1].split("]")[0] for line in lines}
        assert "sesame" not in log.read_text()


@pytest.fixture
def client(server: Process) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="sesame", max_retries=0) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/other")


def test_a_chat_is_the_same_streamed_or_not(client: openai.OpenAI) -> None:
    options: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 24, "temperature": 0, "n": 2}
    complete = client.chat.completions.create(**options)
    stream = client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    texts, reasons, usage = {0: "", 1: ""}, {}, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert [c.message.content for c in complete.choices] == [texts[0], texts[1]]
    assert [c.finish_reason for c in complete.choices] == [reasons[0], reasons[1]]
    assert usage is not None and complete.usage is not None
    assert usage.completion_tokens == complete.usage.completion_tokens
    assert usage.prompt_tokens == complete.usage.prompt_tokens == 8


def test_metrics_count_what_the_client_counts(client: openai.OpenAI, server: Process) -> None:
    before = samples(server.client.get("/metrics").text)
    options: Any = {
        "model": "tiny",
        "max_tokens": 9,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    usages = []
    for n in (1, 1, 3):
        usages.append(
            client.completions.create(prompt="the same words again", n=n, **options).usage
        )
        stream = client.completions.create(
            prompt=["a", "b"], n=n, stream=True, stream_options={"include_usage": True}, **options
        )
        usages.append([chunk.usage for chunk in stream][-1])
    text = client.completions.create(prompt="x", **options).choices[0].text
    stopped = client.completions.create(prompt="x", stop=[text[2]], **options)
    assert stopped.choices[0].finish_reason == "stop"
    usages.append(stopped.usage)
    assert server.settles()
    after = samples(server.client.get("/metrics").text)

    def grown(name: str, **labels: str) -> float:
        return one(after, name, **labels) - one(before, name, **labels)

    prompt = sum(usage.prompt_tokens for usage in usages if usage is not None)
    output = sum(usage.completion_tokens for usage in usages if usage is not None)
    assert (
        grown("vllm:prompt_tokens_total") == prompt + 1 == grown("vllm:request_prompt_tokens_sum")
    )
    assert grown("vllm:request_generation_tokens_sum") == output + 9
    assert grown("vllm:request_success_total", finished_reason="stop") == 1
    assert grown("vllm:request_success_total", finished_reason="length") == 1 + 1 + 3 + 2 * 5 + 1
    assert grown("vllm:request_success_total", finished_reason="abort") == 0
    assert grown("vllm:request_queue_time_seconds_count") == 3 + 2 * 3 + 2
    assert grown("vllm:request_prefill_time_seconds_sum") > 0
    parts = (
        grown("vllm:request_prefill_time_seconds_sum"),
        grown("vllm:request_decode_time_seconds_sum"),
    )
    assert sum(parts) == pytest.approx(grown("vllm:request_inference_time_seconds_sum"))
    assert grown("vllm:iteration_tokens_total_count") == grown("treadle_engine_steps_total") > 9
    assert grown("vllm:iteration_tokens_total_sum") > 0
    assert one(after, "vllm:cache_config_info", enable_prefix_caching="True", engine="0") == 1


def test_completions_of_every_prompt_form(client: openai.OpenAI) -> None:
    options: Any = {"model": "tiny", "max_tokens": 6, "temperature": 0}
    ids = client.post("/../tokenize", cast_to=object, body={"prompt": "abc"})["tokens"]  # type: ignore[index]
    text = client.completions.create(prompt="abc", **options).choices[0].text
    assert client.completions.create(prompt=ids, **options).choices[0].text == text
    batch = client.completions.create(prompt=["abc", "xyz"], **options)
    assert [c.index for c in batch.choices] == [0, 1] and batch.choices[0].text == text
    many = client.completions.create(prompt=[ids, ids], n=2, **options)
    assert [c.text for c in many.choices] == [text] * 4
    streamed = {0: "", 1: ""}
    for chunk in client.completions.create(prompt=["abc", "xyz"], stream=True, **options):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == {c.index: c.text for c in batch.choices}


def test_echo_scores_a_prompt_as_generation_did(client: openai.OpenAI) -> None:
    options: Any = {"model": "tiny", "temperature": 0, "logprobs": 2}
    generated = client.completions.create(
        prompt="abc", max_tokens=5, extra_body={"return_token_ids": True}, **options
    ).choices[0]
    ids = generated.prompt_token_ids + generated.token_ids  # type: ignore[attr-defined]
    scored = client.completions.create(prompt=ids, max_tokens=0, echo=True, **options).choices[0]
    assert scored.logprobs is not None and generated.logprobs is not None
    assert scored.logprobs.token_logprobs is not None
    assert scored.logprobs.token_logprobs[0] is None
    assert scored.logprobs.token_logprobs[3:] == pytest.approx(
        generated.logprobs.token_logprobs, abs=1e-4
    )


def test_chat_logprobs(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3
    ).choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert len(choice.logprobs.content) == 4
    for token in choice.logprobs.content:
        assert token.logprob == max(t.logprob for t in token.top_logprobs)


def test_errors_are_the_clients_own_classes(client: openai.OpenAI, server: Process) -> None:
    chat: Any = client.chat.completions.create
    with pytest.raises(openai.NotFoundError) as missing:
        chat(model="other", messages=HELLO)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        chat(model="tiny", messages=[{"role": "user", "content": "x" * 600}])
    assert long.value.code == "context_length_exceeded"
    assert "This model's maximum context length is 512 tokens. However, the prompt" in str(
        long.value
    )
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as third:
            prompts = [[5], [6], [7] * 600]
            client.completions.create(model="tiny", prompt=prompts, max_tokens=1, stream=stream)
        assert (third.value.code, third.value.param) == ("context_length_exceeded", "prompt[2]")
    with pytest.raises(openai.BadRequestError) as hot:
        chat(model="tiny", messages=HELLO, temperature=1000, stream=True)
    assert hot.value.param == "temperature"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.BadRequestError):
        chat(model="tiny", messages=HELLO, tools=[{"type": "function", "function": {"name": "f"}}])


ODD: list[dict[str, Any]] = [
    {name: value}
    for name in ("stop_token_ids", "allowed_token_ids")
    for value in ([-1], [320], [2**31], [2**63], [2**70])
]
ODD += [{"logit_bias": {str(token): 1}} for token in (-1, 320, 2**31, 2**70)]
ODD += [{"prompt": prompt} for prompt in ([-1], [320], [2**70], [[1], [320]], "", [], [""], [[]])]
ODD += [{"prompt": "x" * 600}, {"prompt": [1] * 512}, {"prompt": "a", "max_tokens": 2**31 - 1}]
ODD += [{"min_tokens": 10**18}, {"max_tokens": 10**30}, {"seed": 2**64}, {"n": 10**9}]
ODD += [{"guided_regex": "("}, {"response_format": {"type": "json_object"}}, {"priority": 2**40}]
ODD += [
    {"prompt": "a\x00b\ufffe"},
    {"stop": ["\x00"]},
    {"cache_salt": "/../x"},
    {"bad_words": ["\n"]},
]


def test_no_odd_request_costs_more_than_itself(server: Process) -> None:
    codes = []
    for fields in ODD:
        for stream in (False, True):
            body = {"prompt": "ab", "max_tokens": 2, "stream": stream, **fields}
            response = server.client.post("/v1/completions", json=body)
            assert response.status_code in (200, 400), (fields, response.text)
            codes.append(response.status_code)
    assert codes.count(400) > 50
    assert server.client.get("/health").status_code == 200
    assert server.settles()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_everything(server: Process, stream: bool) -> None:
    body = b'{"prompt":"ab","n":4,"ignore_eos":true,"max_tokens":480,"stream":%s}'
    body %= b"true" if stream else b"false"
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer sesame\r\n"
    host, port = server.url.removeprefix("http://").split(":")
    before = server.metric("treadle_generation_tokens_total")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        deadline = time.monotonic() + 5
        while server.metric("treadle_num_requests_running") < 4 and time.monotonic() < deadline:
            pass
    assert server.settles()
    assert 0 < server.metric("treadle_generation_tokens_total") - before < 4 * 480


def test_many_at_once(client: openai.OpenAI, server: Process) -> None:
    def ask(i: int) -> str:
        answer = client.completions.create(
            model="tiny", prompt=f"{i % 4}", max_tokens=8, temperature=0
        )
        return answer.choices[0].text

    expected = [ask(i) for i in range(4)]
    texts: dict[int, str] = {}
    threads = [threading.Thread(target=lambda i=i: texts.update({i: ask(i)})) for i in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert texts == {i: expected[i % 4] for i in range(24)}
    assert server.settles()


def test_the_api_process_holds_no_torch(server: Process) -> None:
    def libraries(pid: int) -> str:
        return Path(f"/proc/{pid}/maps").read_text()

    assert "libtorch" not in libraries(server.process.pid)
    assert any("libtorch" in libraries(child) for child in server.children)


def test_there_is_one_listener(server: Process) -> None:
    inodes = set()
    for pid in (server.process.pid, *server.children):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                if match := re.match(r"socket:\[(\d+)\]", os.readlink(fd)):
                    inodes.add(match[1])
            except FileNotFoundError:
                continue
    tables = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
    rows = [line.split() for table in tables for line in table.read_text().splitlines()[1:]]
    listening = [row[1] for row in rows if row[3] == "0A" and row[9] in inodes]
    assert len(listening) == 1


def test_a_killed_engine_is_told_and_the_process_fails(model: Path, tmp_path: Path) -> None:
    with served(model, tmp_path / "log") as server:
        (child,) = [c for c in server.children if "torch" in Path(f"/proc/{c}/maps").read_text()]
        body = {"prompt": "ab", "ignore_eos": True, "max_tokens": 500, "stream": True}
        with server.client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: {")
            os.kill(child, signal.SIGKILL)
            rest = [line for line in lines if line]
        assert "engine_dead" in rest[-2] and rest[-1] == "data: [DONE]"
        assert server.ends() != 0
    log = server.log.read_text()
    assert re.search(r"the engine has died: .* was killed by SIGKILL.*\((not|out|probably)\b", log)
    assert re.search(r"broke off POST /v1/completions of 127.0.0.1: 503 engine_dead", log)


def test_the_fallback_serves_what_no_plugin_has(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The greedy tokens are transformers' own."""
    import torch
    from transformers import AutoModelForCausalLM

    from treadle.testing.checkpoints import make_checkpoint

    folder = make_checkpoint(
        tmp_path_factory.mktemp("phi"), "Phi3ForCausalLM", tokenizer=True, sliding_window=8
    )
    prompt = [5, 9, 200, 17]
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = reference.generate(
        torch.tensor([prompt]), max_new_tokens=16, do_sample=False, eos_token_id=None
    )
    with served(folder, tmp_path_factory.mktemp("log") / "server.log") as process:
        options = {"prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        answer = process.client.post(
            "/v1/completions", json={**options, "logprobs": 0, "return_token_ids": True}
        ).json()
        assert answer["usage"]["completion_tokens"] == 16, answer
        assert answer["choices"][0]["token_ids"] == expected[0, len(prompt) :].tolist()
        chat = process.client.post(
            "/v1/chat/completions",
            json={"messages": HELLO, "max_tokens": 8, "temperature": 0},
        )
        assert chat.status_code == 200 and chat.json()["usage"]["completion_tokens"] > 0
        process.signal(signal.SIGTERM)
        assert process.ends() == 0


def test_a_signal_lets_streams_finish(server: Process) -> None:
    """The last test of this file: the server that the others used ends here."""
    body = {"prompt": "ab", "ignore_eos": True, "max_tokens": 500, "n": 4, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        server.signal(signal.SIGTERM)
        while server.client.get("/ready").status_code == 200:
            pass
        refused = server.client.post("/v1/completions", json=body)
        rest = [line for line in lines if line]
    assert refused.status_code == 503
    assert sum('"finish_reason":"length"' in line for line in rest) == 4
    assert rest[-1] == "data: [DONE]"
    assert server.ends() == 0
