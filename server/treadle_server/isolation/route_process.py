"""The process of an isolated server plugin, as the server starts and ends it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import weakref
from typing import Any

import msgspec

from treadle.errors import PluginLoadError
from treadle.processes.failure import Failure
from treadle.processes.framing import encode_frame, receive_frame
from treadle.processes.spawn import exit_reason, spawn
from treadle_server.isolation.process import ask_tokenizer
from treadle_server.isolation.route_wire import (
    AnyFromChild,
    AnyToChild,
    Ask,
    Generate,
    Output,
    PluginLoaded,
    Route,
    Routes,
    Start,
    StartFailed,
    Told,
    server_decoder,
)
from treadle_server.isolation.wire import Call, Hello, Reply, decode, encode, pack

__all__ = ("MEMORY", "RouteProcess", "told")

MEMORY = 2 << 30
"""Bytes by which the process may grow from where it is before it imports the plugin: each thread that
runs a handler reserves some."""
START_SECONDS = 60.0
"""How long the import may take, and the hook with what the application opens."""
EXIT_SECONDS = 1.0
"""How long a child whose socket has ended may take to exit, before it is killed."""
END_SECONDS = 3.0
"""How long the process may take to end once its socket is closed: longer than it gives itself."""
ENTRY = "treadle_server.isolation.route_child:main"


class RouteProcess:
    """One child: first it imports the plugin, then its hook is called, then it serves ``sock``.

    ``id`` names the plugin. The child ends with this object.
    """

    def __init__(self, id: str, hello: Hello) -> None:
        """Import the plugin. Raises ``PluginLoadError`` within ``START_SECONDS``, and ``OSError``."""
        self.id = id
        self._decoder = server_decoder()
        self._child, self.sock = spawn(ENTRY)
        self._finalizer = weakref.finalize(self, _kill, self._child, self.sock)
        deadline = time.monotonic() + START_SECONDS
        self._start_with(hello, deadline, "imported", PluginLoaded)

    @property
    def pid(self) -> int:
        return self._child.pid

    def begin(self, start: Start, tokenizer: Any) -> list[Route]:
        """Call the hook and return the routes that it has added.

        Raises what the hook raised, and ``PluginLoadError`` within ``START_SECONDS``.
        """
        deadline = time.monotonic() + START_SECONDS
        reply: Routes = self._start_with(start, deadline, "started", Routes, tokenizer)
        return reply.routes

    def end(self) -> None:
        """Wait until the child has ended by itself, of which a closed socket tells it, or kill it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(END_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End the child now, and what it has started."""
        self._finalizer()

    def exit_reason(self) -> str:
        """Return how a child ended whose socket has ended, which it may take a moment to do."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(EXIT_SECONDS)
        self.kill()
        return exit_reason(self._child.wait())

    def _start_with(
        self,
        message: msgspec.Struct,
        deadline: float,
        what: str,
        expected: type[Any],
        tokenizer: Any = None,
    ) -> Any:
        """Send a message and return the reply, after the questions that come before it."""
        try:
            self._send(message, deadline)
            while True:
                seconds = max(deadline - time.monotonic(), 0.001)
                reply: AnyFromChild = self._decoder.decode(receive_frame(self.sock, seconds))
                match reply:
                    case StartFailed(failure):
                        raise failure.error()
                    case Ask():
                        self._send(told(reply, tokenizer), deadline)
                    case Generate(generation):
                        failure = Failure("EngineError", "the server has not started yet")
                        self._send(Output(generation, failure=failure), deadline)
                    case _ if isinstance(reply, expected):
                        self.sock.settimeout(None)
                        return reply
        except TimeoutError:
            self.kill()
            raise PluginLoadError(
                f"{self.id} takes more than {START_SECONDS:g} s to be {what}; its process was ended"
            ) from None
        except (OSError, msgspec.MsgspecError) as error:
            reason = self.exit_reason()
            raise PluginLoadError(f"{self.id}: its process {reason} when it was {what}") from error
        except BaseException:
            self.kill()
            raise

    def _send(self, message: AnyToChild | msgspec.Struct, deadline: float) -> None:
        self.sock.settimeout(max(deadline - time.monotonic(), 0.001))
        self.sock.sendall(encode_frame(message))


def told(question: Ask, tokenizer: Any) -> Told:
    """Return what ``tokenizer`` says to a question. Whatever the question is, it raises nothing."""
    try:
        call: Call = decode(question.call, Call, kept=lambda _, text: text)
        reply = Reply(pack(ask_tokenizer(tokenizer, call)))
    except Exception as error:  # the plugin asked for it, and hears of it
        reply = Reply(failure=Failure.of(error))
    return Told(question.question, encode(reply))


def _kill(child: subprocess.Popen[bytes], sock: socket.socket) -> None:
    """Kill a child, and what it has forked: it leads a process group."""
    sock.close()
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    child.wait()
