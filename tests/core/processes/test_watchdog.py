"""Calls in threads that can be abandoned."""

from __future__ import annotations

import asyncio
import threading
from time import monotonic
from typing import Any

import pytest

from treadle.processes.watchdog import TIMEOUT_FACTOR, WatchdogExecutor


async def test_calls_behind_a_slow_one_go_on_in_another_thread() -> None:
    watchdog, gate = WatchdogExecutor(0.05), threading.Event()
    first = watchdog.submit(lambda: gate.wait(30))
    futures = [watchdog.submit(lambda i=i: (i, threading.get_ident())) for i in range(50)]
    results: Any = await asyncio.gather(*futures)
    assert [i for i, _ in results] == list(range(50)) and not first.done()
    gate.set()
    assert await first is True, "slow, but in time"
    assert watchdog.num_stuck == 0
    watchdog.close()


async def test_a_call_is_given_up_after_some_budgets_and_errors_pass() -> None:
    watchdog, gate = WatchdogExecutor(0.02), threading.Event()
    start_time = monotonic()
    with pytest.raises(TimeoutError):
        await watchdog.submit(lambda: gate.wait(30))
    assert monotonic() - start_time >= TIMEOUT_FACTOR * 0.02 and watchdog.num_stuck == 1
    for error in (KeyError("k"), StopIteration(), SystemExit(3)):

        def fail(error: BaseException = error) -> None:
            raise error

        with pytest.raises(KeyError if isinstance(error, KeyError) else RuntimeError):
            await watchdog.submit(fail)
    gate.set()
    await until(lambda: watchdog.num_stuck == 0)
    watchdog.close()


async def until(condition: Any, wait: float = 5.0) -> None:
    async with asyncio.timeout(wait):
        while not condition():
            await asyncio.sleep(0.005)
