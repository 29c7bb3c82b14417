"""Runs chat templates in a process with limits.

The sandbox keeps a template from Python's insides, not from loops without end or texts of
gigabytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from treadle.api.isolation import IsolatedProcess, limit_cpu, limit_memory, serve_requests
from treadle.errors import CheckpointError, RequestError

__all__ = ("TemplateProcess", "main")

SECONDS = 10.0  # of which a new child needs some to start
MEMORY = 1 << 30


class _RenderRequest(msgspec.Struct, array_like=True):
    source: str
    variables: dict[str, Any]


class _RenderReply(msgspec.Struct, array_like=True):
    """``text``, or why there is none. ``failure`` says that the template itself is at fault."""

    text: str | None
    reason: str = ""
    failure: bool = False


class TemplateProcess:
    """Renders in a child, one request at a time. Safe in threads.

    The child is started at once, and ends with this object or its process.
    """

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._process = IsolatedProcess("treadle_jinja.isolation:main")
        self._process.start()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def render(self, source: str, variables: Mapping[str, Any]) -> str:
        """Raises ``RequestError``, also for a template that takes too long or too much, and
        ``CheckpointError`` for one that cannot be compiled."""
        ask = msgspec.msgpack.encode(_RenderRequest(source, dict(variables)))
        try:
            data = self._process.request(ask, self._seconds)
        except TimeoutError:
            raise RequestError(
                f"the chat template did not finish within {self._seconds:g} s; send less, or "
                "another template",
                param="messages",
            ) from None
        except OSError as error:
            raise RequestError(
                f"the chat template broke its process, whose memory is limited to "
                f"{MEMORY >> 20} MiB; send less, or use another template",
                param="messages",
            ) from error
        answer = msgspec.msgpack.decode(data, type=_RenderReply)
        if answer.text is not None:
            return answer.text
        if answer.failure:
            raise CheckpointError(answer.reason)
        raise RequestError(answer.reason, param="messages")

    def close(self) -> None:
        """End the child. The next ``render`` starts another one."""
        self._process.close()


# ------------------------------------------------------------------------------- the child


def main(fd: int) -> None:
    """The entry of the child; ``fd`` is its end of a socket pair."""
    from treadle_jinja.template import ChatTemplate

    limit_memory(MEMORY)
    templates: dict[str, ChatTemplate] = {}

    def answer(data: bytes) -> bytes:
        limit_cpu(SECONDS)  # nobody is left to kill a child whose parent died meanwhile
        ask = msgspec.msgpack.decode(data, type=_RenderRequest)
        return msgspec.msgpack.encode(_answer(templates, ask))

    serve_requests(fd, answer)


def _answer(templates: dict[str, Any], ask: _RenderRequest) -> _RenderReply:
    from treadle_jinja.template import ChatTemplate

    try:
        if ask.source not in templates:
            templates[ask.source] = ChatTemplate(ask.source)
        return _RenderReply(templates[ask.source].render(ask.variables))
    except RequestError as error:
        return _RenderReply(None, str(error))
    except CheckpointError as error:
        return _RenderReply(None, str(error), failure=True)
