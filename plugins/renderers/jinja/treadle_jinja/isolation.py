"""Runs chat templates in processes with limits.

The sandbox keeps a template from Python's insides, not from loops without end or texts of
gigabytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import lru_cache
from queue import Empty, LifoQueue
from typing import TYPE_CHECKING, Any

import msgspec

from treadle.api.isolation import (
    IsolatedProcess,
    ProcessExit,
    limit_cpu,
    limit_memory,
    serve_requests,
)
from treadle.errors import CheckpointError, OutOfMemoryError, RequestError

if TYPE_CHECKING:
    from treadle_jinja.template import ChatTemplate

__all__ = ("TemplateProcesses", "main")

SECONDS = 10.0  # of which a new child needs some to start
MEMORY = 1 << 30
MAX_PROCESSES = 3
MAX_TEMPLATES = 16
"""Compiled templates that a child keeps."""
PATIENCE = 0.1
"""Seconds to wait for a busy child before another one is started."""


class _RenderRequest(msgspec.Struct, array_like=True):
    source: str
    variables: dict[str, Any]


class _RenderReply(msgspec.Struct, array_like=True):
    """``text``, or why there is none. ``failure`` says that the template itself is at fault."""

    text: str | None
    reason: str = ""
    failure: bool = False


class TemplateProcesses:
    """Renders in children, one request at a time in each. Safe in threads.

    One child is started for the first text, or by ``start``; others when all have been busy for a
    while: a template that is slow does not hold up others. They end with this object or its process.
    """

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._processes: list[IsolatedProcess] = []
        # The one that was used last comes first: others stay idle while it suffices.
        self._idle: LifoQueue[IsolatedProcess] = LifoQueue()
        self._idle.put(self._add())

    def start(self) -> None:
        """Start a child before the first text comes."""
        self._processes[0].start()

    @property
    def pids(self) -> list[int | None]:
        """The children; ``None`` for one that will be started again."""
        return [process.pid for process in self._processes]

    def render(self, source: str, variables: Mapping[str, Any]) -> str:
        """Raises ``RequestError``, also for a template that takes too long or too much,
        ``CheckpointError`` for one that cannot be compiled, and ``OutOfMemoryError`` if the child was
        killed by others."""
        ask = msgspec.msgpack.encode(_RenderRequest(source, dict(variables)))
        process = self._take()
        try:
            data = process.request(ask, self._seconds)
        except TimeoutError:
            raise RequestError(
                f"the chat template did not finish within {self._seconds:g} s; send less, or "
                "another template",
                param="messages",
            ) from None
        except OSError as error:
            if not isinstance(error, ProcessExit) or error.was_killed:
                raise OutOfMemoryError(
                    f"the process that renders chat templates is gone, perhaps because this machine has "
                    f"too little memory ({error}); try again later"
                ) from error
            raise RequestError(
                f"the chat template broke its process, whose memory is limited to "
                f"{MEMORY >> 20} MiB; send less, or use another template",
                param="messages",
            ) from error
        finally:
            self._idle.put(process)
        answer = msgspec.msgpack.decode(data, type=_RenderReply)
        if answer.text is not None:
            return answer.text
        if answer.failure:
            raise CheckpointError(answer.reason)
        raise RequestError(answer.reason, param="messages")

    def close(self) -> None:
        """End the children. The next ``render`` starts another one."""
        for process in self._processes:
            process.close()

    def _take(self) -> IsolatedProcess:
        try:
            return self._idle.get(timeout=PATIENCE)
        except Empty:
            with self._lock:
                if len(self._processes) < MAX_PROCESSES:
                    return self._add()
        return self._idle.get()

    def _add(self) -> IsolatedProcess:
        self._processes.append(IsolatedProcess("treadle_jinja.isolation:main"))
        return self._processes[-1]


# ------------------------------------------------------------------------------- the child


def main(fd: int) -> None:
    """The entry of the child; ``fd`` is its end of a socket pair."""
    from treadle_jinja.template import ChatTemplate

    limit_memory(MEMORY)
    open_template = lru_cache(MAX_TEMPLATES)(ChatTemplate)

    def answer(data: bytes) -> bytes:
        limit_cpu(SECONDS)  # nobody is left to kill a child whose parent died meanwhile
        ask = msgspec.msgpack.decode(data, type=_RenderRequest)
        return msgspec.msgpack.encode(_answer(open_template, ask))

    serve_requests(fd, answer)


def _answer(open_template: Callable[[str], ChatTemplate], ask: _RenderRequest) -> _RenderReply:
    try:
        return _RenderReply(open_template(ask.source).render(ask.variables))
    except RequestError as error:
        return _RenderReply(None, str(error))
    except CheckpointError as error:
        return _RenderReply(None, str(error), failure=True)
