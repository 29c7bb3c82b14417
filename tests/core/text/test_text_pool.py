"""Texts wait their turn in threads: the shortest first, each client fairly, and not too many."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from treadle.errors import QueueFullError
from treadle.text.text_pool import (
    LONG_TEXT,
    MAX_PENDING_CHARS,
    MAX_SLOW_JOBS,
    NUM_THREADS,
    SHORT_TEXT,
    TextPool,
)


class Gate:
    """Jobs that wait until they are let go; ``begun`` are their names in the order of beginning."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.opened = threading.Event()

    def job(self, name: str, wait: bool = True) -> Callable[[], str]:
        def work() -> str:
            self.begun.append(name)
            if wait:
                assert self.opened.wait(60)
            return name

        return work


@pytest.fixture
async def pool() -> AsyncIterator[TextPool]:
    pool = TextPool(60.0, 100)
    yield pool
    pool.close()


@pytest.fixture
async def gate() -> AsyncIterator[Gate]:
    gate = Gate()
    yield gate
    gate.opened.set()


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


def later(pool: TextPool, *arguments: Any, **options: Any) -> asyncio.Task[Any]:
    return asyncio.create_task(pool.run(*arguments, **options))


async def blocked(pool: TextPool, gate: Gate, client: str = "other") -> list[asyncio.Task[Any]]:
    """Give every thread a job that waits."""
    names = [f"blocker{i}" for i in range(NUM_THREADS)]
    tasks = [later(pool, gate.job(name), 1, client=client) for name in names]
    await until(lambda: len(gate.begun) == NUM_THREADS)
    gate.begun.clear()
    return tasks


async def test_the_shortest_runs_first(
    pool: TextPool, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treadle.text.text_pool.NUM_THREADS", 1)
    tasks = [later(pool, gate.job("first"), 1)]
    await until(lambda: gate.begun == ["first"])
    for size in (5, 3, 9, 1):
        tasks.append(later(pool, gate.job(f"{size}", wait=False), size * LONG_TEXT // 9))
    gate.opened.set()
    await until(lambda: all(task.done() for task in tasks))
    assert gate.begun == ["first", "1", "3", "5", "9"]


async def test_one_thread_is_left_for_texts_that_are_not_long(pool: TextPool, gate: Gate) -> None:
    long = [later(pool, gate.job(f"long{i}"), LONG_TEXT + 1) for i in range(5)]
    await until(lambda: len(gate.begun) == NUM_THREADS - 1)
    assert await pool.run(gate.job("short", wait=False), LONG_TEXT) == "short"
    assert {*gate.begun[:-1]} == {"long0", "long1"} and gate.begun[-1] == "short"
    gate.opened.set()
    assert await asyncio.gather(*long) == [f"long{i}" for i in range(5)]


async def test_a_client_with_much_to_do_waits_for_others(pool: TextPool, gate: Gate) -> None:
    size = LONG_TEXT // 2
    busy = [later(pool, gate.job("busy"), size, client="a") for _ in range(NUM_THREADS + 3)]
    await until(lambda: len(gate.begun) == NUM_THREADS)
    other = later(pool, gate.job("other", wait=False), 2 * size, client="b")
    await asyncio.sleep(0)
    pool._pending.charge("a", 1e9)  # however slow this machine is
    chosen = pool._next_job()
    assert chosen is not None and chosen.client == "b", "longer, but a has had three"
    pool._pending.push(chosen)
    gate.opened.set()
    assert await other == "other"
    await asyncio.gather(*busy)


async def test_a_long_text_is_not_overtaken_for_ever(
    pool: TextPool, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treadle.text.text_pool.NUM_THREADS", 1)
    tasks = [later(pool, gate.job("first"), 1)]
    await until(lambda: gate.begun == ["first"])
    tasks.append(later(pool, gate.job("long", wait=False), LONG_TEXT))
    await asyncio.sleep(0)
    pool._pending._arrivals[next(iter(pool._pending))] -= 1.0  # it has waited
    tasks.append(later(pool, gate.job("short", wait=False), 1))
    await asyncio.sleep(0)
    gate.opened.set()
    await asyncio.gather(*tasks)
    assert gate.begun == ["first", "long", "short"]


async def test_what_waits_is_bounded(gate: Gate) -> None:
    pool = TextPool(60.0, 2)
    tasks = await blocked(pool, gate)
    tasks += [later(pool, gate.job("a", wait=False), 10) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError, match="2 texts of 20 characters"):
        await pool.run(gate.job("b", wait=False), 1)
    gate.opened.set()
    await asyncio.gather(*tasks)
    assert await pool.run(gate.job("b", wait=False), 1) == "b"
    pool.close()


async def test_the_characters_that_wait_are_bounded(pool: TextPool, gate: Gate) -> None:
    tasks = await blocked(pool, gate)
    tasks.append(later(pool, gate.job("alone", wait=False), MAX_PENDING_CHARS * 2))
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError, match=f"{MAX_PENDING_CHARS} characters"):
        await pool.run(gate.job("b", wait=False), 1)
    gate.opened.set()
    await asyncio.gather(*tasks)


async def test_a_cancelled_job_never_begins(pool: TextPool, gate: Gate) -> None:
    tasks = await blocked(pool, gate)
    gone = later(pool, gate.job("gone", wait=False), 1)
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.wait([gone])
    assert gone.cancelled() and not pool._pending
    tasks[0].cancel()  # it runs: only its result is dropped
    gate.opened.set()
    await asyncio.wait(tasks)
    assert await pool.run(gate.job("next", wait=False), 1) == "next"
    assert gate.begun == ["next"]


async def test_short_texts_need_no_thread_unless_there_are_many(pool: TextPool) -> None:
    loop_thread = threading.get_ident()

    async def where(size: int) -> bool:
        return await pool.run(threading.get_ident, size, inline=True) == loop_thread

    assert await where(SHORT_TEXT)
    await asyncio.sleep(0)
    assert not await where(SHORT_TEXT + 1)
    tasks = [asyncio.create_task(where(SHORT_TEXT // 4)) for _ in range(8)]
    assert await asyncio.gather(*tasks) == [True] * 4 + [False] * 4, "all in one turn of the loop"
    assert await where(SHORT_TEXT)


async def test_errors_reach_the_caller(pool: TextPool) -> None:
    for error in (KeyError("k"), StopIteration(), SystemExit(3)):

        def fail(error: BaseException = error) -> None:
            raise error

        with pytest.raises(KeyError if isinstance(error, KeyError) else RuntimeError):
            await pool.run(fail, 1)


async def test_jobs_that_hang_leave_their_threads_to_others(gate: Gate) -> None:
    pool = TextPool(0.02, 100)
    hanging = [later(pool, gate.job("hangs"), 1) for _ in range(MAX_SLOW_JOBS)]
    for _ in range(3):
        assert await pool.run(gate.job("fine", wait=False), 1) == "fine"
    results = await asyncio.gather(*hanging, return_exceptions=True)
    assert all(isinstance(result, TimeoutError) for result in results)
    with pytest.raises(TimeoutError, match="stuck"):
        await pool.run(gate.job("late", wait=False), 1)
    assert "late" not in gate.begun
    for trial in range(NUM_THREADS):  # each has a thread that nobody else waits for
        pool._retry_times[None] = 0.0
        with pytest.raises(TimeoutError, match="longer"):
            await pool.run(gate.job(f"trial {trial}"), 1)
        with pytest.raises(TimeoutError, match="stuck"):
            await pool.run(gate.job("late", wait=False), 1)
    pool._retry_times[None] = 0.0
    assert await pool.run(gate.job("works again", wait=False), 1) == "works again"
    gate.opened.set()
    await until(lambda: not pool._slow)
    assert await pool.run(gate.job("fine", wait=False), 1) == "fine"
    pool.close()
