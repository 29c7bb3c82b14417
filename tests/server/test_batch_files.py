"""The input of a batch, read in pieces, and its journal, cut anywhere."""

from __future__ import annotations

import asyncio
import io
import threading
import tracemalloc
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle_server.batches import lines as lines_module
from treadle_server.batches.endpoints import failure_output
from treadle_server.batches.journal import Journal, JournalError
from treadle_server.batches.lines import InputLine, LineReader
from treadle_server.batches.runner import BatchInput
from treadle_server.batches.wire import LineOutput, LineResponse

MAX = 8


def read_all(data: bytes, max_bytes: int) -> list[InputLine]:
    reader = LineReader(io.BytesIO(data), max_bytes)
    lines = []
    while some := reader.read():
        lines += some
    return lines


@given(
    st.lists(st.sampled_from([b"\n", b"\r\n", b"a", b" ", b"\r", b"\xff", b"long enough"])),
    st.integers(1, 5),
)
def test_lines_are_those_of_the_file_however_it_is_cut(pieces: list[bytes], chunk: int) -> None:
    data = b"".join(pieces)
    expected = []
    for number, line in enumerate(data.split(b"\n"), 1):
        line = line.rstrip(b"\r")
        if len(line) > MAX:
            expected.append(InputLine(number, None))
        elif line.strip():
            expected.append(InputLine(number, line))
    before, lines_module.CHUNK_BYTES = lines_module.CHUNK_BYTES, chunk
    try:
        found = read_all(data, MAX)
    finally:
        lines_module.CHUNK_BYTES = before
    assert [(x.number, x.data) for x in found] == [(x.number, x.data) for x in expected]


async def test_neither_a_long_line_nor_a_long_file_is_held(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    with path.open("wb") as file:
        file.write(b'{"custom_id": "' + b"x" * 50)
        file.seek(100_000_000)  # a line of 100 MB
        file.write(b"\n" * 100_000 + b"{}\n" * 2000)
    source = BatchInput(path=path, endpoints=("/v1/completions",), max_line_bytes=10_000)
    tracemalloc.start()
    try:
        codes = [str(request.code) async for _, request in source.lines()]  # type: ignore[union-attr]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert codes[0] == "line_too_long" and len(codes) == 2001
    assert peak < 20_000_000


def answer(custom_id: str, status: int = 200) -> LineOutput:
    usage = {"prompt_tokens": 2, "completion_tokens": 3}
    body = {"usage": usage} if status == 200 else {"error": {}}
    response = LineResponse(status_code=status, request_id="r", body=body)
    return LineOutput(id="batch_req_0", custom_id=custom_id, response=response)


async def written(path: Path, *outputs: LineOutput) -> bytes:
    journal = Journal(path)
    await journal.open()
    for output in outputs:
        await journal.write(output)
    await journal.close()
    return path.read_bytes()


async def test_a_journal_that_was_cut_anywhere_continues(tmp_path: Path) -> None:
    outputs = [answer("a"), answer("ö", 400), failure_output(None, "invalid_json_line", "x", 3)]
    data = await written(tmp_path / "whole", *outputs)
    ends = [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]
    path = tmp_path / "cut"
    for size in sorted({*range(0, len(data) + 1, 7), *ends, *(end - 1 for end in ends)}):
        path.write_bytes(data[:size])
        num_whole = sum(end <= size for end in ends)
        journal = Journal(path)
        await journal.open()
        assert [journal.has_id("a"), journal.has_id("ö"), journal.has_line(3)] == [
            i < num_whole for i in range(3)
        ]
        assert journal.counts.completed + journal.counts.failed == num_whole
        assert journal.usage.output_tokens == (3 if num_whole else 0)
        await journal.close()
        assert path.read_bytes() == data[: ([0, *ends])[num_whole]]
    assert await written(path) == data


@pytest.mark.parametrize(
    "content", [b"notes", b"notes\n", b'{"custom_id": "a"}\n', b'{"id":"batch_req_0"}\n', b"\xff\n"]
)
async def test_a_file_of_somebody_else_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes"
    path.write_bytes(content)
    with pytest.raises(JournalError, match="cannot be continued"):
        await Journal(path).open()
    assert path.read_bytes() == content


async def test_a_journal_has_one_writer(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "out")
    await journal.open()
    with pytest.raises(JournalError, match="being written by another process"):
        await Journal(tmp_path / "out").open()
    await journal.close()
    await written(tmp_path / "out", answer("a"))


async def test_a_writer_that_is_cancelled_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "out"
    journal = Journal(path)
    await journal.open()
    tasks = [asyncio.create_task(journal.write(answer(str(i)))) for i in range(50)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await journal.close()
    rows = [msgspec.json.decode(row) for row in path.read_bytes().splitlines()]
    assert len(rows) == journal.counts.completed >= 25
    assert {row["custom_id"] for row in rows} >= {str(i) for i in range(1, 50, 2)}
    assert all(journal.has_id(row["custom_id"]) for row in rows)


async def test_a_journal_is_closed_by_a_task_that_is_cancelled(tmp_path: Path) -> None:
    """Twice: by what stops the lines, and by what stops the server."""
    disk = threading.Event()
    disk.set()
    journal = Journal(tmp_path / "out", reserve=lambda _: disk.wait())
    await journal.open()
    disk.clear()
    writer = asyncio.create_task(journal.write(answer("a")))
    await asyncio.sleep(0)
    closing = asyncio.create_task(journal.close())
    for _ in range(2):
        await asyncio.sleep(0)
        closing.cancel()
    disk.set()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await writer
    again = Journal(tmp_path / "out")
    await again.open()
    assert again.counts.completed == 1
    await again.close()
