"""The process of one isolated plugin: imports it below a memory limit, and calls it as it is told."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Any

import msgspec

from treadle.api import types
from treadle.api.contracts import implements, members
from treadle.api.kinds import CORE_KINDS
from treadle.errors import TreadleError
from treadle.plugins import Entry, PluginManager
from treadle.processes.failure import Failure, printable
from treadle.processes.framing import receive_frame, send_frame
from treadle.processes.isolated import ignore_interrupts, limit_memory
from treadle.processes.lifeline import end_with_parent
from treadle_server.isolation.wire import Call, Hello, ObjectHandle, Reply, decode, encode, pack

__all__ = ("TOKENIZER_DATA", "TOKENIZER_METHODS", "main")

TOKENIZER_METHODS = tuple(
    m.name for m in members(types.Tokenizer) if not m.is_property and m.name != "create_detokenizer"
)
MATCH = "treadle_match"
MAX_REPLY_BYTES = 64 * 2**20
TOKENIZER_DATA = (
    *(m.name for m in members(types.Tokenizer) if m.is_property),
    "chat_templates",
    "added_tokens",
)
"""What may be read of a tokenizer. It does not change, so that the child asks once."""


def main(fd: int) -> None:
    """The entry of the child; ``fd`` is its end of a socket pair."""
    ignore_interrupts()
    end_with_parent(fd)  # a call that hangs does not read the socket
    with socket.socket(fileno=fd) as sock, suppress(ConnectionError):
        hello = msgspec.msgpack.decode(receive_frame(sock), type=Hello)
        limit_memory(hello.memory)
        plugin = IsolatedObjects(hello, sock)
        send_frame(sock, b"")
        while True:
            send_frame(sock, plugin.answer(receive_frame(sock)))


class ObjectLost(Exception):
    """The object of a call is not there: another process has built it."""


class RemoteTokenizer:
    """The tokenizer of the server, to which each call goes; what does not change is asked once."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._data: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name in TOKENIZER_METHODS:
            return lambda *arguments, **named: self._ask(name, arguments, named)
        if name not in TOKENIZER_DATA:
            raise AttributeError(f"an isolated plugin has no {name!r} of the tokenizer")
        if name not in self._data:
            self._data[name] = self._ask(name, (), {}, read=True)
        if self._data[name] is None and name not in types.Tokenizer.__dict__:
            raise AttributeError(name)
        return self._data[name]

    def _ask(self, name: str, arguments: Any, named: Any, *, read: bool = False) -> Any:
        call = Call(0, name, pack(list(arguments)), pack(dict(named)), read)
        send_frame(self._sock, encode(Reply(callback=call)))
        reply: Reply = decode(receive_frame(self._sock), Reply, kept=_no_texts)
        if reply.failure is not None:
            raise reply.failure.error()
        return reply.value


class IsolatedObjects:
    """The objects that the plugin has built, by number, and the texts that only it may read."""

    def __init__(self, hello: Hello, sock: socket.socket) -> None:
        self._tokenizer = RemoteTokenizer(sock)
        self._objects: dict[int, Any] = {}
        self._count = 0
        self._hello = hello
        self._kinds = {kind.name: kind for kind in CORE_KINDS}
        self._plugins = PluginManager(source=lambda: (), kinds=self._kinds)
        self._entry = self._declare(hello.kind, hello.key)
        with suppress(TreadleError):  # the first call reports it
            self._plugins.loader.load(self._entry)

    def answer(self, data: bytes) -> bytes:
        """Make one call and return its reply."""
        try:
            call: Call = decode(data, Call, kept=self._text, tokenizer=self._tokenizer)
            for number in call.freed:
                self._objects.pop(number, None)
            reply = encode(Reply(pack(self._call(call), self._keep)))
            if len(reply) > MAX_REPLY_BYTES:
                raise ValueError(f"a result of {len(reply)} bytes; {MAX_REPLY_BYTES} are allowed")
            return reply
        except TreadleError as error:
            return encode(Reply(failure=Failure.of(error)))
        except BaseException as error:  # also what ends a process: here it is the plugin's failure
            name, text = type(error).__name__, self._entry.error_text(error)
            text = printable(text.removeprefix(f"{name}: "))
            return encode(Reply(failure=Failure("EngineError", text), error=name))

    def _call(self, call: Call) -> Any:
        if call.target:
            if call.target not in self._objects:
                raise ObjectLost
            instance = self._objects[call.target]
            if call.read:
                return getattr(instance, call.method)
            return getattr(instance, call.method)(*call.arguments, **call.named)
        if not call.method:
            return self._plugins.loader.load(self._entry) and None
        return self._call_hook(call)

    def _call_hook(self, call: Call) -> Any:
        """Call a hook of the plugin; ``arguments`` are kind, key and options as the user wrote them."""
        kind, key, options = call.arguments
        entry, plugins = self._declare(kind, key), self._plugins
        plugins.config = msgspec.structs.replace(plugins.config, plugin_options={entry.id: options})
        if call.method == MATCH:
            named = {**call.named, "kind": kind, "key": key, "options": plugins.options(kind, key)}
            return plugins.hooks(entry).call(MATCH, named)
        instance = plugins.create(self._kinds[kind], key, **call.named)
        self._count += 1
        self._objects[self._count] = instance
        optional = [c.__name__ for c in self._kinds[kind].optional if implements(instance, c)]
        return msgspec.structs.astuple(ObjectHandle(self._count, optional))

    def _declare(self, kind: str, key: str) -> Entry:
        """Return the entry of a key; the same object of the plugin serves all of them."""
        hello = self._hello
        entries = self._plugins.entries
        if not any((e.kind, e.key) == (kind, key) for e in entries):
            entry = Entry(kind, key, hello.target, hello.dist, hello.version, file=hello.file)
            entries.append(entry)
        return self._plugins.choose(kind, key)

    def _keep(self, text: str) -> int:
        self._count += 1
        self._objects[self._count] = text
        return self._count

    def _text(self, number: int, text: str) -> Any:
        if number not in self._objects:  # its plain text may mean something else
            raise ObjectLost
        return self._objects[number]


def _no_texts(number: int, text: str) -> str:
    return text
