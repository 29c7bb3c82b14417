"""The states of batches, on an engine that does what a test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from scripted import ScriptedEngine
from serving import Server, serving, until

from treadle.config import from_options
from treadle.errors import ConfigError, EngineDeadError, QueueFullError
from treadle_server.batches.files import FileRecord
from treadle_server.batches.records import BatchRecord
from treadle_server.batches.storage import check_files_dir
from treadle_server.batches.wire import FileObject
from treadle_server.config import server_from_options

ENDED = ("failed", "completed", "expired", "cancelled")
MAX_NUM_SEQS = 4


def small_engine(**options: Any) -> ScriptedEngine:
    engine = ScriptedEngine(**options)
    engine.config = from_options(
        model="scripted", served_model_name=["scripted"], max_num_seqs=MAX_NUM_SEQS
    )
    return engine


class Gate:
    """Holds every request of an engine until it is opened for some."""

    def __init__(self) -> None:
        self.permits = asyncio.Semaphore(0)

    async def __call__(self, step: int) -> None:
        if step == 0:
            await self.permits.acquire()

    def open(self, count: int = 1000) -> None:
        for _ in range(count):
            self.permits.release()


class Client:
    """Speaks to one server after another, with one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server: Server

    @asynccontextmanager
    async def server_with(self, engine: ScriptedEngine, **options: Any) -> AsyncIterator[Server]:
        async with serving(engine, files_dir=str(self.folder), **options) as self.server:
            yield self.server

    async def create(self, num_lines: int, **fields: Any) -> str:
        content = "\n".join(
            json.dumps(
                {
                    "custom_id": str(i),
                    "method": "POST",
                    "url": "/v1/completions",
                    "body": {"prompt": "ab", **fields},
                }
            )
            for i in range(num_lines)
        )
        file = await self.server.client.post(
            "/v1/files", files={"file": content.encode()}, data={"purpose": "batch"}
        )
        body = {
            "input_file_id": file.json()["id"],
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        }
        answer = await self.server.post("/v1/batches", body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    async def get(self, id: str) -> Any:
        return (await self.server.client.get(f"/v1/batches/{id}")).json()

    async def completed(self, id: str, count: int) -> None:
        """Wait until so many answers are written."""
        async with asyncio.timeout(10):
            while (await self.get(id))["request_counts"]["completed"] < count:
                await asyncio.sleep(0.005)

    async def ended(self, id: str) -> Any:
        async with asyncio.timeout(10):
            while (batch := await self.get(id))["status"] not in ENDED:
                await asyncio.sleep(0.005)
        return batch

    async def rows(self, id: str | None) -> dict[str, Any]:
        answer = await self.server.client.get(f"/v1/files/{id}/content")
        return {row["custom_id"]: row for row in map(json.loads, answer.text.splitlines())}


@pytest.fixture
def client(tmp_path: Path) -> Client:
    return Client(tmp_path / "files")


async def test_without_a_folder_every_route_says_how_to_enable_it() -> None:
    async with serving() as server:
        for method, path in (
            *(("GET", "/v1/files"), ("POST", "/v1/files"), ("GET", "/v1/files/file-x")),
            *(("DELETE", "/v1/files/file-x"), ("GET", "/v1/files/file-x/content")),
            *(("GET", "/v1/batches"), ("GET", "/v1/batches/batch_x")),
            ("POST", "/v1/batches/batch_x/cancel"),
        ):
            answer = await server.client.request(method, path)
            assert answer.status_code == 404 and "--files-dir" in answer.text, (method, path)
            assert answer.json()["error"]["code"] == "files_disabled"
        body = {"input_file_id": "x", "endpoint": "/v1/completions", "completion_window": "24h"}
        assert "--files-dir" in (await server.post("/v1/batches", body)).text


async def test_a_folder_belongs_to_one_server(client: Client, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name in (tmp_path / "file", tmp_path / "file/below"):
        with pytest.raises(ConfigError, match="cannot be used"):
            check_files_dir(server_from_options(files_dir=str(name)))
    async with client.server_with(ScriptedEngine()):
        with pytest.raises(ConfigError, match="another server uses"):
            check_files_dir(server_from_options(files_dir=str(client.folder)))
    check_files_dir(server_from_options(files_dir=str(client.folder)))


async def test_requests_of_clients_go_first(client: Client) -> None:
    """Lines take what is left of the slots, and begin again when requests have ended."""
    engine, gate = small_engine(), Gate()
    engine.hold = gate
    async with client.server_with(engine, max_batch_concurrency=3) as server:
        id = await client.create(20)
        await until(lambda: engine.running == 3)
        requests = [asyncio.create_task(server.complete()) for _ in range(4)]
        await until(lambda: engine.running == 7)
        gate.open(3)  # the lines that were first
        await until(lambda: engine.finished == 3)
        assert (await client.get(id))["request_counts"]["completed"] <= 3
        await until(lambda: engine.running == 4)
        for _ in range(20):  # no line begins as long as requests fill the slots
            await asyncio.sleep(0)
            assert engine.running == 4
        gate.open()
        assert {answer.status_code for answer in await asyncio.gather(*requests)} == {200}
        batch = await client.ended(id)
        assert batch["request_counts"] == {"total": 20, "completed": 20, "failed": 0}


async def test_a_line_takes_a_slot_for_each_of_its_sequences(client: Client) -> None:
    """Four prompts are four sequences: other lines and requests of clients count them."""
    engine, gate = small_engine(), Gate()
    engine.hold = gate
    async with client.server_with(engine, max_batch_concurrency=4) as server:
        requests = [asyncio.create_task(server.complete())]
        await until(lambda: engine.running == 1)
        id = await client.create(3, prompt=["a", "b", "c"])
        await until(lambda: engine.running == 4)
        requests.append(asyncio.create_task(server.complete()))
        await until(lambda: engine.running == 5)
        gate.open()
        await asyncio.gather(*requests)
        assert (await client.ended(id))["request_counts"]["completed"] == 3
        wide = await client.create(1, n=3, prompt=["a"] * 5)
        assert (await client.ended(wide))["request_counts"]["completed"] == 1


async def test_what_a_line_has_that_is_unknown_is_named(client: Client) -> None:
    async with client.server_with(ScriptedEngine()):
        batch = await client.ended(await client.create(1, nothing=1))
        row = (await client.rows(batch["output_file_id"]))["0"]
        assert row["response"]["ignored_fields"] == "nothing"
    async with client.server_with(ScriptedEngine(), strict_requests=True):
        batch = await client.ended(await client.create(1, nothing=1))
        assert batch["request_counts"]["failed"] == 1


async def test_lines_have_a_low_priority_if_the_scheduler_heeds_it(client: Client) -> None:
    engine = ScriptedEngine()
    async with client.server_with(engine) as server:
        await client.ended(await client.create(1))
        assert engine.params is not None and engine.params.priority > 0
        await server.complete()
        assert engine.params.priority == 0


async def test_a_queue_that_is_full_is_no_error_of_a_line(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treadle_server.batches.endpoints.RETRY_SECONDS", 0.0)
    refusals = iter([QueueFullError("full")] * 5)

    def refuse(engine: ScriptedEngine, step: int) -> None:
        if error := next(refusals, None):
            raise error

    async with client.server_with(ScriptedEngine(before=refuse)):
        batch = await client.ended(await client.create(3))
    assert batch["request_counts"] == {"total": 3, "completed": 3, "failed": 0}


async def test_what_is_not_run_in_time_expires(client: Client) -> None:
    engine, gate = small_engine(), Gate()
    engine.hold = gate
    gate.open(2)
    async with client.server_with(engine, max_batch_concurrency=2):
        id = await client.create(6)
        await client.completed(id, 2)
    path = client.folder / f"batches/{id}.json"
    record = msgspec.json.decode(path.read_bytes(), type=BatchRecord)
    record.batch.expires_at = record.batch.created_at
    path.write_bytes(msgspec.json.encode(record))
    engine = small_engine()
    engine.hold = Gate()
    async with client.server_with(engine, batch_timeout=0.1) as server:
        batch = await client.ended(id)
        assert batch["status"] == "expired" and batch["expired_at"] is not None
        assert batch["request_counts"] == {"total": 6, "completed": 2, "failed": 4}
        assert len(await client.rows(batch["output_file_id"])) == 2
        rest = await client.rows(batch["error_file_id"])
        assert {row["error"]["code"] for row in rest.values()} == {"batch_expired"}
        assert (await client.ended(await client.create(1)))["status"] == "expired"
        assert engine.running == 0 and not server.context.active_requests


async def test_batches_wait_for_their_turn(client: Client) -> None:
    engine, gate = small_engine(), Gate()
    engine.hold = gate
    async with client.server_with(engine, max_running_batches=1) as server:
        first, second = await client.create(1), await client.create(1)
        await until(lambda: engine.running == 1)
        assert (await client.get(second))["status"] == "validating"
        cancelled = await server.client.post(f"/v1/batches/{second}/cancel")
        assert cancelled.json()["status"] == "cancelling"
        batch = await client.ended(second)
        assert (batch["status"], batch["error_file_id"]) == ("cancelled", None)
        gate.open()
        assert (await client.ended(first))["status"] == "completed"
        ids = [b["id"] for b in (await server.client.get("/v1/batches")).json()["data"]]
        assert sorted(ids) == sorted([first, second])


async def test_a_stop_or_a_dead_engine_leaves_the_rest_to_the_next_server(client: Client) -> None:
    engine, gate = small_engine(), Gate()
    engine.hold = gate
    gate.open(2)
    async with client.server_with(engine):
        id = await client.create(9)
        await client.completed(id, 2)
    assert engine.running == 0

    dying = small_engine()

    def die(engine: ScriptedEngine, step: int) -> None:
        if engine.finished:
            engine.dead = EngineDeadError("gone")

    dying.before = die
    async with client.server_with(dying, max_batch_concurrency=1) as server:
        await client.completed(id, 3)
        await until(lambda: dying.dead is not None and not dying.running)
        assert server.context.batches is not None
        assert server.context.batches.records.unfinished()[0].batch.status == "in_progress"
    engine = small_engine()
    async with client.server_with(engine):
        batch = await client.ended(id)
        assert batch["request_counts"] == {"total": 9, "completed": 9, "failed": 0}
        assert len(await client.rows(batch["output_file_id"])) == 9
        assert engine.finished == 9 - 2 - 1, "what is answered is not run again"
        assert batch["usage"]["total_tokens"] == 9 * (2 + len("Hello world"))


@pytest.mark.parametrize(
    ("status", "ending", "expected"),
    [
        ("validating", "completed", "completed"),
        ("in_progress", "completed", "completed"),
        ("cancelling", "completed", "cancelled"),
        ("finalizing", "completed", "completed"),
        ("finalizing", "expired", "expired"),
    ],
)
async def test_a_server_that_was_killed_in_any_state(
    client: Client, status: Any, ending: Any, expected: str
) -> None:
    engine, gate = small_engine(), Gate()
    engine.hold = gate
    gate.open(2)
    async with client.server_with(engine):
        id = await client.create(4)
        await client.completed(id, 2)
    path = client.folder / f"batches/{id}.json"
    record = msgspec.json.decode(path.read_bytes(), type=BatchRecord)
    record.batch.status, record.ending = status, ending
    path.write_bytes(msgspec.json.encode(record))
    if status == "finalizing":  # the output has a record, but was not moved yet
        file = FileObject(
            id=record.output_id, bytes=9, created_at=1, filename="f", purpose="batch_output"
        )
        data = msgspec.json.encode(FileRecord("", file))
        (client.folder / f"files/{record.output_id}.json").write_bytes(data)
    async with client.server_with(small_engine()):
        batch = await client.ended(id)
        assert batch["status"] == expected
        rows = await client.rows(batch["output_file_id"])
        assert len(rows) == batch["request_counts"]["completed"] >= 2
    assert not list((client.folder / "batches").glob("*.jsonl"))


async def test_what_is_damaged_on_the_disk_costs_itself_alone(client: Client) -> None:
    async with client.server_with(ScriptedEngine()):
        id = await client.create(1)
        await client.ended(id)
        kept = await client.create(1)
        batch = await client.ended(kept)
    (client.folder / f"batches/{id}.json").write_bytes(b"\xff")
    (client.folder / "batches/batch_other.json").write_bytes(b'{"owner": ""}')
    (client.folder / f"files/{batch['input_file_id']}.data").write_bytes(b"shorter")
    (client.folder / "files/file-none.data").write_bytes(b"lost")
    async with client.server_with(ScriptedEngine()) as server:
        listed = (await server.client.get("/v1/batches")).json()["data"]
        assert [b["id"] for b in listed] == [kept]
        files = (await server.client.get("/v1/files")).json()["data"]
        assert batch["output_file_id"] in {f["id"] for f in files}
        assert batch["input_file_id"] not in {f["id"] for f in files}
        assert not (client.folder / "files/file-none.data").exists()
        assert server.context.batches is not None
        assert server.context.batches.files.num_bytes == sum(f["bytes"] for f in files)


async def test_a_restart_keeps_the_order_of_what_was_made_in_one_second(client: Client) -> None:
    async def lists(server: Server) -> list[list[str]]:
        answers = [await server.client.get(path) for path in ("/v1/batches", "/v1/files")]
        return [[item["id"] for item in answer.json()["data"]] for answer in answers]

    async with client.server_with(ScriptedEngine()) as server:
        for _ in range(8):
            await client.ended(await client.create(1))
        before = await lists(server)
    async with client.server_with(ScriptedEngine()) as server:
        assert await lists(server) == before


async def test_files_expire_and_the_oldest_batches_make_room(client: Client) -> None:
    async with client.server_with(ScriptedEngine(), max_files=6) as server:
        ids = []
        for _ in range(8):
            ids.append(await client.create(1))
            batch = await client.ended(ids[-1])
            for file_id in (batch["input_file_id"], batch["output_file_id"]):
                await server.client.delete(f"/v1/files/{file_id}")
        listed = (await server.client.get("/v1/batches", params={"limit": 3})).json()
        assert [b["id"] for b in listed["data"]] == ids[:-4:-1] and listed["has_more"]
        assert (await server.client.get(f"/v1/batches/{ids[0]}")).status_code == 404
    assert len(list((client.folder / "batches").iterdir())) == 6
    async with client.server_with(ScriptedEngine(), max_files=4) as server:
        id = (await client.ended(await client.create(1)))["input_file_id"]
        await server.client.post("/v1/files", files={"file": b"x"}, data={"purpose": "batch"})
        body = {"input_file_id": id, "endpoint": "/v1/completions", "completion_window": "24h"}
        answer = await server.post("/v1/batches", body)
        assert answer.json()["error"]["code"] == "too_many_files", "it would make two more"
    for path in (client.folder / "files").glob("*.json"):
        record = msgspec.json.decode(path.read_bytes(), type=FileRecord)
        record.file.expires_at = record.file.created_at
        path.write_bytes(msgspec.json.encode(record))
    async with client.server_with(ScriptedEngine()) as server:
        assert (await server.client.get("/v1/files")).json()["data"] == []
    assert not list((client.folder / "files").iterdir())


async def test_a_client_that_leaves_while_it_uploads(client: Client) -> None:
    async with client.server_with(ScriptedEngine()) as server:
        head = (
            b"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9999999\r\n"
            b"content-type: multipart/form-data; boundary=b\r\n\r\n"
            b'--b\r\ncontent-disposition: form-data; name="file"; filename="x"\r\n\r\n'
        )
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(head + b"x" * 3_000_000)
        await writer.drain()
        uploads = client.folder / "uploads"
        await until(lambda: any(path.stat().st_size for path in uploads.iterdir()))
        writer.close()
        await until(lambda: not list(uploads.iterdir()))
        assert server.context.batches is not None
        assert server.context.batches.files.num_bytes == 0
        assert (await server.client.get("/v1/files")).json()["data"] == []


async def test_a_file_is_read_to_its_end_while_it_is_deleted(client: Client) -> None:
    async with client.server_with(ScriptedEngine()) as server:
        content = b"0123456789" * 300_000
        answer = await server.client.post(
            "/v1/files", files={"file": content}, data={"purpose": "batch"}
        )
        id = answer.json()["id"]
        async with server.client.stream("GET", f"/v1/files/{id}/content") as response:
            parts = response.aiter_bytes()
            first = await anext(parts)
            async with httpx.AsyncClient() as other:
                assert (await other.delete(f"{server.url}/v1/files/{id}")).json()["deleted"]
            rest = [part async for part in parts]
        assert first + b"".join(rest) == content
