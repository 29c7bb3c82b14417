"""An event loop of asyncio on virtual time."""

from __future__ import annotations

import asyncio
import contextvars
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from simulator.world import World

__all__ = ("SimulatedLoop",)


class SimulatedLoop(asyncio.BaseEventLoop):
    """Callbacks run when the world chooses them, in any order: none may rely on that of another."""

    def __init__(self, world: World) -> None:
        self.world = world
        super().__init__()
        self.connect: Callable[[asyncio.Protocol, Any], Any] | None = None
        self.set_exception_handler(self._report)

    def time(self) -> float:
        return self.world.now

    def _report(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An exception that nobody has taken is a fault of the code under test."""
        error = context.get("exception")
        self.world.note_violation(f"the event loop reports: {context['message']}: {error!r}")

    def call_soon(
        self, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self.world.ready.append(lambda: self._run_handle(handle))
        return handle

    call_soon_threadsafe = call_soon

    def call_at(
        self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self.world.at(when, lambda: self._run_handle(handle))
        return handle

    def call_later(
        self, delay: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Nothing: its time comes, and it does not run."""

    def set_debug(self, enabled: bool) -> None:
        """Nothing: coroutines must not be slower, and the loop is always the same."""

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def _run_handle(self, handle: asyncio.Handle) -> None:
        if not handle.cancelled():
            asyncio._set_running_loop(self)
            try:
                handle._run()
            finally:
                asyncio._set_running_loop(None)

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self.create_future()

        def run() -> None:
            try:
                result = func(*args)
            except Exception as error:
                if not future.cancelled():
                    future.set_exception(error)
            else:
                if not future.cancelled():
                    future.set_result(result)

        self.world.after(self.world.random.random() * 0.01, run)
        return future

    async def create_unix_connection(self, factory: Any, *_: Any, sock: Any, **__: Any) -> Any:
        protocol = factory()
        assert self.connect is not None
        return await self.connect(protocol, sock), protocol

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Asynchronous generators that are dropped are closed on this loop."""
        old = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(
            firstiter=self._asyncgen_firstiter_hook, finalizer=self._asyncgen_finalizer_hook
        )
        try:
            yield
        finally:
            sys.set_asyncgen_hooks(*old)
            self._closed = True
