"""The process of one isolated plugin: imports it below a memory limit, and calls it as it is told."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from treadle.api import types
from treadle.api.contracts import implements, members
from treadle.api.kinds import CORE_KINDS, STRUCTURED_OUTPUT
from treadle.errors import TreadleError
from treadle.plugins import Entry, PluginManager
from treadle.processes.failure import Failure, printable
from treadle.processes.framing import receive_frame, send_frame
from treadle.processes.isolated import ignore_interrupts, limit_memory
from treadle.processes.lifeline import end_with_parent
from treadle_server.hookspecs import SERVER
from treadle_server.isolation.grammars import OBJECTS
from treadle_server.isolation.wire import (
    POLL,
    Call,
    Hello,
    ObjectHandle,
    Reply,
    decode,
    encode,
    pack,
)

__all__ = (
    "TOKENIZER_DATA",
    "TOKENIZER_METHODS",
    "TOKEN_PAGE",
    "RemoteTokenizer",
    "main",
    "no_texts",
)

TOKENIZER_METHODS = tuple(
    m.name for m in members(types.Tokenizer) if not m.is_property and m.name != "create_detokenizer"
)
TOKEN_PAGE = "token_page"
"""Asks for the bytes of ids from one on: a grammar backend reads those of the whole vocabulary."""
PAGE = 4096
POLL_SECONDS = 0.002
"""How long a poll waits for the result, and whoever else calls meanwhile waits for the poll."""
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
        if hello.kind == STRUCTURED_OUTPUT.name:
            import torch  # noqa: F401  # of which bitmasks are made, and whose size is not the plugin's
        limit_memory(hello.memory)
        tokenizer = RemoteTokenizer(sock)
        plugin = IsolatedObjects(hello, tokenizer)
        send_frame(sock, b"")
        while True:
            data = receive_frame(sock)
            with tokenizer.during_call():
                reply = plugin.answer(data)
            send_frame(sock, reply)


class ObjectLost(Exception):
    """The object of a call is not there: another process has built it."""


class RemoteTokenizer:
    """The tokenizer of the server, to which each call goes; what does not change is asked once.

    Safe in threads, which wait for the next call, as the server listens only then.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._lock.acquire()
        self._data: dict[str, Any] = {}
        self._pages: dict[int, list[bytes]] = {}

    @contextmanager
    def during_call(self) -> Iterator[None]:
        """Let threads ask while the server waits for an answer, and wait for those who ask."""
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()

    def token_bytes(self, token: int) -> Any:
        """Return what the tokenizer does, which is asked for many ids at once."""
        if not 0 <= token < self.vocab_size:
            return self._ask("token_bytes", (token,), {})
        page, index = divmod(token, PAGE)
        if page not in self._pages:
            self._pages[page] = self._ask(TOKEN_PAGE, (page * PAGE, PAGE), {})
        return self._pages[page][index]

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
        reply = self._exchange(Call(0, name, pack(list(arguments)), pack(dict(named)), read))
        if reply.failure is not None:
            raise reply.failure.error()
        return reply.value

    def _exchange(self, call: Call) -> Reply:
        with self._lock:
            send_frame(self._sock, encode(Reply(callback=call)))
            reply: Reply = decode(receive_frame(self._sock), Reply, kept=no_texts)
        return reply


class Task:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._result: Any = None
        self._error: BaseException | None = None
        self.done = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def result(self) -> Any:
        """Return or raise what the call has, which is ``done``."""
        if self._error is not None:
            raise self._error
        return self._result

    def _run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:  # whoever polls hears of it
            self._error = error
        self.done.set()


class IsolatedObjects:
    """The objects that the plugin has built, by number, and the texts that only it may read."""

    def __init__(self, hello: Hello, tokenizer: RemoteTokenizer) -> None:
        self._tokenizer = tokenizer
        self._objects: dict[int, Any] = {}
        self._numbers = itertools.count(1)
        self._hello = hello
        self._kinds = {kind.name: kind for kind in (*CORE_KINDS, SERVER)}
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
            result = self._call_beside(call) if call.beside else self._call(call)
            reply = encode(Reply(pack(result, self._keep)))
            if len(reply) > MAX_REPLY_BYTES:
                raise ValueError(f"a result of {len(reply)} bytes; {MAX_REPLY_BYTES} are allowed")
            return reply
        except TreadleError as error:
            return encode(Reply(failure=Failure.of(error)))
        except BaseException as error:  # also what ends a process: here it is the plugin's failure
            name, text = type(error).__name__, self._entry.error_text(error)
            text = printable(text.removeprefix(f"{name}: "))
            return encode(Reply(failure=Failure("EngineError", text), error=name))

    def _call_beside(self, call: Call) -> Any:
        """Poll a call in a thread, or begin one."""
        number, task = call.target, self._objects.get(call.target)
        if call.method != POLL:
            number, task = self._number(), Task(lambda: self._call(call))
            self._objects[number] = task
        if not isinstance(task, Task):
            raise ObjectLost
        if not task.done.wait(POLL_SECONDS):
            return number, None
        del self._objects[number]
        return 0, task.result()

    def _call(self, call: Call) -> Any:
        if call.target:
            if call.target not in self._objects:
                raise ObjectLost
            instance = self._objects[call.target]
            if call.read:
                return getattr(instance, call.method)
            result = getattr(instance, call.method)(*call.arguments, **call.named)
            return self._hold(result, call.builds) if call.builds else result
        if not call.method:
            return self._plugins.loader.load(self._entry) and None
        return self._call_hook(call)

    def _call_hook(self, call: Call) -> Any:
        """Call a hook of the plugin; ``arguments`` are kind, key and options as the user wrote them."""
        kind, key, options = call.arguments
        entry, plugins = self._declare(kind, key), self._plugins
        known = {**plugins.config.plugin_options, entry.id: options}  # others may be building
        plugins.config = msgspec.structs.replace(plugins.config, plugin_options=known)
        if call.method == MATCH:
            named = {**call.named, "kind": kind, "key": key, "options": plugins.options(kind, key)}
            return plugins.hooks(entry).call(MATCH, named)
        contract = self._kinds[kind]
        instance = plugins.create(contract, key, **call.named)
        optional = [c.__name__ for c in contract.optional if implements(instance, c)]
        builds: Any = contract.builds
        return self._hold(instance, builds.__name__, optional)

    def _hold(self, instance: Any, contract: str, optional: Sequence[str] = ()) -> Any:
        """Keep an object of the plugin, and return what stands for it in a message."""
        number, adapt = self._number(), OBJECTS.get(contract)
        self._objects[number] = instance if adapt is None else adapt(instance, self._objects)
        return msgspec.structs.astuple(ObjectHandle(number, list(optional)))

    def _declare(self, kind: str, key: str) -> Entry:
        """Return the entry of a key; the same object of the plugin serves all of them."""
        hello = self._hello
        entries = self._plugins.entries
        if not any((e.kind, e.key) == (kind, key) for e in entries):
            entry = Entry(kind, key, hello.target, hello.dist, hello.version, file=hello.file)
            entries.append(entry)
        return self._plugins.choose(kind, key)

    def _keep(self, text: str) -> int:
        number = self._number()
        self._objects[number] = text
        return number

    def _number(self) -> int:
        return next(self._numbers)

    def _text(self, number: int, text: str) -> Any:
        if number not in self._objects:  # its plain text may mean something else
            raise ObjectLost
        return self._objects[number]


def no_texts(number: int, text: str) -> str:
    """Return ``text``: nothing that a tokenizer says is kept by the other process."""
    return text
