"""``/v1/files`` and ``/v1/batches`` of a real server with the demo model, by the official client.

The server has two keys, small bounds, and is killed and started again on the way.
"""

from __future__ import annotations

import json
import resource
import signal
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from process import Process, served

pytestmark = pytest.mark.own_python

SUM = [{"role": "user", "content": "What is 12 plus 30?"}]
BOUNDS = (
    *("--max-file-bytes", "200000", "--max-stored-file-bytes", "600000", "--max-files", "20"),
    *("--max-batch-requests", "40", "--max-body-bytes", "4096", "--max-num-seqs", "4"),
)


class Servers:
    """One server at a time, on one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "server.log"
        self._context: Any = None
        self.process: Process

    def start(self) -> None:
        self._context = served(
            *(Path("demo:treadle-demo"), self.log, "--served-model-name", "demo"),
            *("--files-dir", str(self.folder / "files"), *BOUNDS),
            *("--api-key", "anna", "--api-key", "bert"),
        )
        self.process = self._context.__enter__()

    def stop(self, number: int = signal.SIGTERM) -> None:
        self.process.signal(number)
        self.process.ends()
        assert "Traceback" not in self.log.read_text()
        self._context.__exit__(None, None, None)

    def client(self, key: str) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.process.url}/v1", api_key=key, max_retries=0, timeout=30
        )


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    servers = Servers(tmp_path_factory.mktemp("batches"))
    servers.start()
    yield servers
    servers.stop()


@pytest.fixture
def client(servers: Servers) -> Iterator[openai.OpenAI]:
    """Anna's, who has no file afterwards."""
    with servers.client("anna") as client:
        yield client
    with servers.client("anna") as client:  # of a new server perhaps
        for batch in client.batches.list():
            if batch.status in ("validating", "in_progress"):
                client.batches.cancel(batch.id)
            ended(client, batch)
        for file in client.files.list():
            client.files.delete(file.id)


def line(custom_id: str, url: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    if not body and url == "/v1/chat/completions":
        body = {"model": "demo", "messages": SUM, "temperature": 0, "max_tokens": 12}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def upload(client: openai.OpenAI, lines: Sequence[Any] | bytes, **options: Any) -> Any:
    content = lines if isinstance(lines, bytes) else "\n".join(map(json.dumps, lines)).encode()
    return client.files.create(file=("in.jsonl", content), purpose="batch", **options)


def create(client: openai.OpenAI, lines: Sequence[Any] | bytes, **options: Any) -> Any:
    options = {"endpoint": "/v1/chat/completions", "completion_window": "24h", **options}
    return client.batches.create(input_file_id=upload(client, lines).id, **options)


def ended(client: openai.OpenAI, batch: Any, wait: float = 60.0) -> Any:
    deadline = time.monotonic() + wait
    while batch.status not in ("failed", "completed", "expired", "cancelled"):
        assert time.monotonic() < deadline, batch
        time.sleep(0.02)
        batch = client.batches.retrieve(batch.id)
    return batch


def results(client: openai.OpenAI, id: str | None) -> dict[str, Any]:
    assert id is not None
    rows = [json.loads(row) for row in client.files.content(id).text.splitlines()]
    assert all(row.keys() == {"id", "custom_id", "response", "error"} for row in rows)
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["custom_id"]: row for row in rows}


def test_a_file_goes_up_and_comes_down(client: openai.OpenAI) -> None:
    content = json.dumps(line("ä" * 100)).encode() * 50
    file = client.files.create(
        file=("../../etc/päss\x00wd.jsonl", content),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert (file.bytes, file.purpose, file.status) == (len(content), "batch", "processed")
    assert "/" not in file.filename and file.filename.endswith("wd.jsonl")
    assert file.expires_at == file.created_at + 3600
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).content == content
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError, match="there is no file"):
        client.files.content(file.id)


def test_lists_have_pages(client: openai.OpenAI) -> None:
    ids = [upload(client, b"x").id for _ in range(5)]
    other = client.files.create(file=b"y", purpose="user_data")
    assert [f.id for f in client.files.list(limit=2, order="asc")] == [*ids, other.id]
    assert [f.id for f in client.files.list(limit=2, purpose="batch")] == ids[::-1]
    page = client.files.list(limit=2, after=ids[0], order="asc")
    assert ([f.id for f in page.data], page.has_more) == (ids[1:3], True)
    for query in ({"limit": 0}, {"limit": 10_001}, {"order": "up"}, {"after": "file-none"}):
        with pytest.raises(openai.BadRequestError) as error:
            client.files.list(**query)
        assert error.value.param == next(iter(query))


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/chat/completions", {"messages": SUM, "max_tokens": 12}),
        ("/v1/completions", {"prompt": "A page is", "max_tokens": 8, "logprobs": 2, "n": 2}),
        ("/v1/responses", {"input": "What is 12 plus 30?", "max_output_tokens": 16}),
    ],
)
def test_a_batch_answers_what_the_route_answers(
    client: openai.OpenAI, endpoint: str, body: dict[str, Any]
) -> None:
    body = {"model": "demo", "temperature": 0, **body}
    batch = ended(client, create(client, [line("a", endpoint, **body)], endpoint=endpoint))
    assert (batch.status, batch.error_file_id, batch.model) == ("completed", None, "demo")
    row = results(client, batch.output_file_id)["a"]
    assert row["error"] is None and row["response"]["status_code"] == 200
    expected = client.post(endpoint.removeprefix("/v1"), cast_to=object, body=body)
    assert without_ids(row["response"]["body"]) == without_ids(expected)
    assert batch.usage.total_tokens == expected["usage"]["total_tokens"]  # type: ignore[index]
    assert batch.usage.output_tokens > 0
    assert client.files.retrieve(batch.output_file_id).purpose == "batch_output"


def without_ids(value: Any) -> Any:
    """An answer without what differs from one to the next: ids, times, and what was cached."""
    changing = {"id", "created", "created_at", "completed_at", "cached_tokens"}
    if isinstance(value, dict):
        return {k: without_ids(v) for k, v in value.items() if k not in changing}
    return [without_ids(v) for v in value] if isinstance(value, list) else value


def test_every_request_has_its_own_error(client: openai.OpenAI) -> None:
    chat = line("")["body"]
    lines = [
        line("good"),
        line("model", **{**chat, "model": "gpt-9"}),
        line("value", **{**chat, "temperature": -1}),
        line("stream", **{**chat, "stream": True}),
        {**line("body"), "body": [1]},
        line("long", model="demo", messages=[{"role": "user", "content": "x " * 1900}]),
        line("also good"),
    ]
    batch = ended(client, create(client, lines, metadata={"of": "test"}))
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (7, 2, 5)
    assert batch.status == "completed" and batch.metadata == {"of": "test"}
    assert results(client, batch.output_file_id).keys() == {"good", "also good"}
    errors = results(client, batch.error_file_id)
    shown = {
        id: (row["response"]["status_code"], row["response"]["body"]["error"]["param"])
        for id, row in errors.items()
    }
    assert shown == {
        "model": (404, "model"),
        "value": (400, "temperature"),
        "stream": (400, "stream"),
        "body": (400, None),
        "long": (400, "prompt"),
    }
    assert errors["long"]["response"]["body"]["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("content", "errors"),
    [
        (b"", [("empty_file", None)]),
        (b"\n \n", [("empty_file", None)]),
        (b"{\n[]\n", [("invalid_json_line", 1), ("invalid_request_line", 2)]),
        (json.dumps(line("ü")).encode("latin-1", "replace") + b"\xff", [("invalid_json_line", 1)]),
        (json.dumps(line("a")).encode("utf-16"), [("invalid_json_line", 1)]),
        (b'{"custom_id": "a"}', [("missing_required_parameter", 1)]),
        (json.dumps(line("")).encode(), [("invalid_request_line", 1)]),
        (json.dumps(line("a") | {"custom_id": 1}).encode(), [("invalid_request_line", 1)]),
        (json.dumps(line("a") | {"method": "GET"}).encode(), [("invalid_method", 1)]),
        (json.dumps(line("a", "/v1/completions", prompt="x")).encode(), [("invalid_url", 1)]),
        (
            f"{json.dumps(line('a'))}\r\n\n{json.dumps(line('a'))}".encode(),
            [("duplicate_custom_id", 3)],
        ),
        (b'{"custom_id":"a","x":"' + b"y" * 5000 + b'"}', [("line_too_long", 1)]),
        (b"[" * 4000, [("invalid_json_line", 1)]),
        (b"{}\n" * 41, [("too_many_requests", None)]),
    ],
    ids=lambda value: value[0][0] if isinstance(value, list) else "",
)
def test_a_wrong_file_fails_as_a_whole(
    client: openai.OpenAI, content: bytes, errors: list[tuple[str, int | None]]
) -> None:
    batch = ended(client, create(client, content))
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
    assert batch.failed_at is not None and batch.errors is not None
    assert [(e.code, e.line) for e in batch.errors.data or ()] == errors[:100]


def test_a_mark_at_the_start_and_other_line_ends_are_no_fault(client: openai.OpenAI) -> None:
    content = b"\xef\xbb\xbf" + b"\r\n".join(json.dumps(line(i)).encode() for i in "ab")
    batch = ended(client, create(client, content))
    assert batch.status == "completed"
    assert results(client, batch.output_file_id).keys() == {"a", "b"}


def test_requests_that_cannot_be_taken(client: openai.OpenAI) -> None:
    file = upload(client, [line("a")])
    data = client.files.create(file=b"x", purpose="user_data")
    good: Any = {
        "input_file_id": file.id,
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    }
    for changes, param in (
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"input_file_id": data.id}, "input_file_id"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, None),
    ):
        with pytest.raises(openai.BadRequestError) as error:
            client.batches.create(**{**good, **changes})
        assert param in (None, error.value.param), error.value
    with pytest.raises(openai.BadRequestError, match="purpose is 'evil'"):
        client.files.create(file=b"x", purpose="evil")  # type: ignore[arg-type]
    answer = httpx.post(
        f"{client.base_url}files",
        headers=client.auth_headers,
        files={"other": b"x"},
        data={"purpose": "batch"},
    )
    assert answer.status_code == 400 and "file is missing" in answer.text
    with pytest.raises(openai.BadRequestError, match="expires_after"):
        upload(client, b"x", expires_after={"anchor": "created_at", "seconds": 1})
    with pytest.raises(openai.APIStatusError, match="send a form") as error:
        client.post("/files", cast_to=object, body={"purpose": "batch"})
    assert error.value.status_code == 415  # type: ignore[attr-defined]


def test_a_form_that_is_cut_or_is_none(servers: Servers, client: openai.OpenAI) -> None:
    headers = {"authorization": "Bearer anna", "content-type": "multipart/form-data; boundary=b"}
    url = f"{servers.process.url}/v1/files"
    begin = b'--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'
    for body in (b"", b"none", begin + b"cut", begin * 2, b"--b\r\n" + b"x: y\r\n" * 1000):
        answer = httpx.post(url, headers=headers, content=body)
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_form", body
    part = b'--b\r\ncontent-disposition: form-data; name="%b"\r\n\r\n%b\r\n'
    answer = httpx.post(url, headers=headers, content=part % (b"purpose", b"y" * 2000) + b"--b--")
    assert answer.status_code == 400 and "more than 1024 bytes" in answer.text
    answer = httpx.post(url, headers=headers, content=part % (b"x", b"") * 99 + b"--b--")
    assert answer.status_code == 400
    assert list(client.files.list()) == []
    assert list((servers.folder / "files/uploads").iterdir()) == []


def test_bounds(servers: Servers, client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError, match="more than 200000 bytes") as error:
        upload(client, b"x" * 300_000)
    assert error.value.status_code == 413
    chunks = (b"z" * 10_000 for _ in range(40))  # without a content length
    body = iter([b'--b\r\ncontent-disposition: form-data; name="file"\r\n\r\n', *chunks])
    headers = {"authorization": "Bearer anna", "content-type": "multipart/form-data; boundary=b"}
    answer = httpx.post(f"{servers.process.url}/v1/files", headers=headers, content=body)
    assert answer.status_code == 413 and answer.json()["error"]["code"] == "file_too_large"
    for _ in range(3):
        upload(client, b"x" * 190_000)
    with pytest.raises(openai.APIStatusError, match="more than 600000 bytes") as error:
        upload(client, b"x" * 190_000)
    assert error.value.status_code == 413
    for _ in range(17):
        upload(client, b"x")
    with pytest.raises(openai.BadRequestError, match="at most 20 may be"):
        upload(client, b"x")
    assert list((servers.folder / "files/uploads").iterdir()) == []


def test_another_key_sees_nothing(servers: Servers, client: openai.OpenAI) -> None:
    batch = ended(client, create(client, [line("a")]))
    with servers.client("bert") as other:
        assert list(other.files.list()) == [] and list(other.batches.list()) == []
        for call in (
            lambda: other.files.retrieve(batch.input_file_id),
            lambda: other.files.content(batch.output_file_id),
            lambda: other.files.delete(batch.output_file_id),
            lambda: other.batches.retrieve(batch.id),
            lambda: other.batches.cancel(batch.id),
            lambda: other.batches.create(
                input_file_id=batch.input_file_id,
                endpoint="/v1/chat/completions",
                completion_window="24h",
            ),
        ):
            with pytest.raises(openai.NotFoundError):
                call()
    assert client.batches.retrieve(batch.id).id == batch.id


PATHS = (
    *("../server.log", "..%2f..%2fserver.log", "%2e%2e%2fserver.log", "..", "%2e%2e", "%00"),
    *("....//server.log", "file-x/../../server.log", "/etc/passwd", "..\\..\\server.log"),
    *("file-x%00", "lock", "x" * 5000, "file-*", "%c0%ae%c0%ae%2f", "..;/lock"),
)


def test_an_id_is_no_path(servers: Servers) -> None:
    root = httpx.URL(servers.process.url)
    with httpx.Client(headers={"authorization": "Bearer anna"}) as client:
        for path, suffix, method in product(PATHS, ("", "/content"), ("GET", "DELETE")):
            url = root.copy_with(raw_path=f"/v1/files/{path}{suffix}".encode())
            answer = client.request(method, url)
            assert answer.status_code in (404, 405), (method, path, answer.text)
            assert "demo:treadle-demo" not in answer.text
    assert servers.log.exists() and (servers.folder / "files/lock").exists()


def test_a_disk_that_is_full_fails_the_batch_and_nothing_else(
    servers: Servers, client: openai.OpenAI
) -> None:
    """The limit of file sizes has the effect of a full disk: a write in the middle of a file fails."""
    pid = servers.process.process.pid
    file = upload(client, [line(str(i)) for i in range(6)])
    soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (1400, hard))  # two answers
    try:
        options: Any = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = ended(client, client.batches.create(input_file_id=file.id, **options))
        with pytest.raises(openai.APIStatusError, match="could not be written") as error:
            upload(client, b"x" * 3000)
        assert error.value.status_code == 507
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))
    assert batch.status == "failed" and batch.errors is not None
    assert [e.code for e in batch.errors.data or ()] == ["storage_full"]
    counts = batch.request_counts
    assert 0 < counts.completed < 6 and counts.failed == 0
    assert len(results(client, batch.output_file_id)) == counts.completed, "whole lines are kept"
    again = ended(client, client.batches.create(input_file_id=file.id, **options))
    assert again.status == "completed" and again.request_counts.completed == 6
    assert list((servers.folder / "files/uploads").iterdir()) == []


def test_cancel_delete_and_start_again(servers: Servers, client: openai.OpenAI) -> None:
    """A batch that runs keeps its file, survives ``kill -9``, and is cancelled with what it has."""
    chat = {**line("")["body"], "max_tokens": 50, "ignore_eos": True}
    batch = create(client, [line(str(i), **chat) for i in range(40)])
    while (batch := client.batches.retrieve(batch.id)).request_counts.completed < 1:
        assert batch.status in ("validating", "in_progress"), batch
        time.sleep(0.02)
    with pytest.raises(openai.ConflictError, match="has not ended"):
        client.files.delete(batch.input_file_id)
    finished = batch.request_counts.completed
    servers.stop(signal.SIGKILL)
    (journal,) = (servers.folder / "files/batches").glob("*.output.jsonl")
    with journal.open("ab") as file:
        file.write(b'{"id":"batch_req_half')
    (servers.folder / "files/uploads/left").write_bytes(b"half")
    servers.start()
    with servers.client("anna") as client:
        batch = client.batches.retrieve(batch.id)
        while batch.request_counts.completed < finished:
            batch = client.batches.retrieve(batch.id)
        assert client.batches.cancel(batch.id).status == "cancelling"
        batch = ended(client, batch)
        assert batch.status == "cancelled" and batch.cancelled_at is not None
        answers = results(client, batch.output_file_id)
        rest = results(client, batch.error_file_id)
        assert answers.keys() | rest.keys() == {str(i) for i in range(40)}
        assert not answers.keys() & rest.keys() and len(answers) >= finished
        assert {row["error"]["code"] for row in rest.values()} == {"batch_cancelled"}
        counts = batch.request_counts
        assert (counts.completed, counts.failed) == (len(answers), len(rest))
        with pytest.raises(openai.ConflictError, match="cannot be cancelled"):
            client.batches.cancel(batch.id)
        assert client.files.delete(batch.input_file_id).deleted
        assert [b.id for b in client.batches.list(limit=1).data] == [batch.id]
        for file in client.files.list():
            client.files.delete(file.id)
    assert list((servers.folder / "files/uploads").iterdir()) == []
    servers.process.client.headers["authorization"] = "Bearer anna"
    assert servers.process.settles()
