"""What an isolated server plugin gets in place of the engine and of the server's context.

The engine generates, and its tokenizer answers, through the server. Everything else of the two is an
object of another process: reading it is an error that says so.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

from treadle.api.sampling_params import SamplingParams
from treadle.api.step_types import EngineInfo
from treadle.outputs import RequestOutput
from treadle_server.isolation.child import RemoteTokenizer, no_texts
from treadle_server.isolation.route_wire import Abort, Generate, Output, Start
from treadle_server.isolation.wire import Call, Reply, decode, encode

__all__ = (
    "Engine",
    "IsolatedContext",
    "Link",
    "NotIsolated",
    "Refusing",
    "current_request",
)

current_request: ContextVar[int] = ContextVar("current_request", default=0)
"""The request that the running code answers, 0 outside of one."""


class Link(Protocol):
    """The connection to the server, as the objects of this module use it. Safe in threads."""

    def send(self, message: Any) -> None:
        """Send a message."""

    def ask(self, call: bytes) -> bytes:
        """Return the reply of the server's tokenizer, for which this thread waits."""


class NotIsolated(AttributeError):
    """The plugin reads something that only exists in the server's own process."""


class Refusing:
    """Something of the server that an isolated plugin may not use. ``what`` names it."""

    def __init__(self, what: str) -> None:
        self.__dict__["_what"] = what

    def __getattr__(self, name: str) -> Any:
        raise _refusal(self._what, name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise _refusal(self._what, name)

    def __getitem__(self, key: Any) -> Any:
        raise _refusal(self._what, repr(key))

    def __iter__(self) -> Any:
        raise _refusal(self._what, "its items")

    def __len__(self) -> int:
        raise _refusal(self._what, "its length")


def _refusal(what: str, name: str) -> NotIsolated:
    return NotIsolated(
        f"{name} of {what} is not there for an isolated plugin, which has only the engine's generate, "
        "tokenizer, info, model and alive, and the context's engine, model, names, started and new_id: "
        "start the server without --isolate for this plugin if you trust it"
    )


class _Tokenizer(RemoteTokenizer):
    """The tokenizer of the server. Safe in threads, of which the event loop's is one."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._data: dict[str, Any] = {}
        self._pages: dict[int, list[bytes]] = {}

    def _exchange(self, call: Call) -> Reply:
        reply: Reply = decode(self._link.ask(encode(call)), Reply, kept=no_texts)
        return reply


class Engine:
    """The engine of the server. Use ``generate`` on the event loop that calls the handlers."""

    alive = True
    """The server ends this process with its engine."""

    def __init__(self, link: Link, start: Start) -> None:
        self._link = link
        self._outputs: dict[int, asyncio.Queue[Output]] = {}
        self._num_generations = 0
        self.info: EngineInfo = start.info
        self.model: str = start.models[0]
        self.tokenizer = _Tokenizer(link)

    def __getattr__(self, name: str) -> Any:
        raise _refusal("the engine", name)

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, *, request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield outputs until the request is finished. Closing the iterator aborts the request.

        The server ends it with the request that is being answered, and names it itself.
        """
        self._num_generations += 1
        number = self._num_generations
        outputs = self._outputs[number] = asyncio.Queue()
        is_over = False
        try:
            self._link.send(Generate(number, current_request.get(), prompt, sampling_params))
            while True:
                output = await outputs.get()
                if output.failure is not None:
                    is_over = True
                    raise output.failure.error()
                if output.output is None:
                    is_over = True
                    return
                yield output.output
        finally:
            del self._outputs[number]
            if not is_over:
                self._link.send(Abort(number))

    def on_output(self, output: Output) -> None:
        """Take an output from the server, on the event loop."""
        if (outputs := self._outputs.get(output.generation)) is not None:
            outputs.put_nowait(output)


class IsolatedContext:
    """The part of ``ServerContext`` that an isolated plugin has."""

    def __init__(self, engine: Engine, names: Sequence[str]) -> None:
        self.engine = engine
        self.names = list(names)
        self.model = self.names[0]
        self.started = int(time.time())

    def __getattr__(self, name: str) -> Any:
        raise _refusal("the server's context", name)

    def new_id(self, prefix: str) -> str:
        """Return an id that cannot be guessed."""
        return f"{prefix}-{secrets.token_hex(16)}"
