"""Objects that stand for those of an isolated plugin: each call goes to its process."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from treadle.api import types as t
from treadle.api.contracts import Member, attributes, is_protocol, members
from treadle.api.result_checks import unexpected
from treadle_server.isolation.process import ObjectLost, PluginProcess
from treadle_server.isolation.wire import Call, ObjectHandle

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ("OPEN_SECONDS", "Origin")

OPEN_SECONDS = 10.0
"""The longest time in which an object may be built."""
STATEFUL = (t.ToolParser, t.ReasoningParser, t.GrammarMatcher)
"""What has read a part of an answer, which is lost with its process. Others remember nothing, and are
built again."""

Built = tuple[Any, int]
"""What stands for an object in a message, and the number of the process that has built it."""


class Origin:
    """How an object of ``contract`` was built, to build it again in a new process.

    A call of the object may take ``seconds``, and may ask ``tokenizer``.
    """

    def __init__(
        self,
        process: PluginProcess,
        contract: type,
        build: Callable[[], Built],
        seconds: float,
        tokenizer: t.Tokenizer,
    ) -> None:
        self.process, self.contract, self.build = process, contract, build
        self.seconds, self.tokenizer = seconds, tokenizer

    def proxy(self, optional: Sequence[type] = ()) -> Any:
        """Build the object and return its proxy, which has those of ``optional`` that the object has."""
        opened, generation = self.open()
        also = tuple(c for c in optional if c.__name__ in opened.optional)
        return _class_of(self.contract, also)(self, opened.target, generation)

    def open(self) -> tuple[ObjectHandle, int]:
        value, generation = self.build()
        return msgspec.convert(value, ObjectHandle), generation


class _Remote:
    """An object of the plugin. A subclass has the methods and properties of its protocols."""

    inline = False
    """A call waits for another process, which must not be done on an event loop."""

    def __init__(self, origin: Origin, target: int, generation: int) -> None:
        self._origin = origin
        self._bind(target, generation)

    def _bind(self, target: int, generation: int) -> None:
        self.place = target, generation  # together: other threads call it meanwhile
        weakref.finalize(self, self._origin.process.free, target, generation).atexit = False

    def _call(self, method: str, *arguments: Any, **named: Any) -> Any:
        return self._send(lambda target: Call(target, method, list(arguments), dict(named)))[0]

    def _read(self, name: str) -> Any:
        return self._send(lambda target: Call(target, name, read=True))[0]

    def _build(self, contract: type, method: str, *arguments: Any, **named: Any) -> Any:
        """Return the proxy of an object that a method builds."""

        def call(target: int) -> Call:
            return Call(target, method, list(arguments), dict(named), builds=contract.__name__)

        origin, beside = self._origin, contract is t.CompiledGrammar
        build = lambda: self._send(call, OPEN_SECONDS, beside=beside)  # noqa: E731
        return Origin(origin.process, contract, build, origin.seconds, origin.tokenizer).proxy()

    def _send(
        self, call: Callable[[int], Call], seconds: float | None = None, *, beside: bool = False
    ) -> Built:
        """Make a call, of an object that is built again if it is lost and remembers nothing."""
        try:
            return self._send_once(call, seconds, beside=beside)
        except ObjectLost:
            if self._origin.contract in STATEFUL:
                raise
            opened, generation = self._origin.open()
            self._bind(opened.target, generation)
            return self._send_once(call, seconds, beside=beside)

    def _send_once(
        self, call: Callable[[int], Call], seconds: float | None = None, *, beside: bool = False
    ) -> Built:
        origin, (target, generation) = self._origin, self.place
        limit = origin.seconds if seconds is None else seconds
        make = origin.process.call_beside if beside else origin.process.call
        return make(call(target), limit, origin.tokenizer, generation)


class _RemoteMatcher(_Remote):
    def fill_bitmask(self, bitmask: Tensor, row: int) -> None:
        """Do what ``GrammarMatcher`` says."""
        line = bitmask[row : row + 1]
        line.numpy()[:] = _masks(self._call("fill_bitmask", line.shape[1]), *line.shape)


class _RemoteCompiler(_Remote):
    """Matchers of a process that is gone fail, and the others of their batch do not."""

    vocab_size = 0

    def fill_bitmasks(
        self, matchers: Sequence[_Remote], bitmask: Tensor, rows: Sequence[int]
    ) -> list[bool | None]:
        """Do what ``SupportsGrammarBatches`` says."""
        num_words = bitmask.shape[1]
        live, numbers = self._live(matchers)
        if not live:
            return [None] * len(matchers)
        vocab_words = -(-self.vocab_size // 32)
        data, results = self._batch("fill_bitmasks", numbers, num_words, vocab_words)
        bitmask.numpy()[[rows[i] for i in live]] = _masks(data, len(live), num_words)
        return _spread(results, live, len(matchers))

    def accept_tokens(
        self, matchers: Sequence[_Remote], tokens: Sequence[int]
    ) -> list[bool | None]:
        """Do what ``SupportsGrammarBatches`` says."""
        live, numbers = self._live(matchers)
        if not live:
            return [None] * len(matchers)
        results = self._batch("accept_tokens", numbers, [tokens[i] for i in live])
        return _spread(results, live, len(matchers))

    def _live(self, matchers: Sequence[_Remote]) -> tuple[list[int], list[int]]:
        """Return which matchers are in the process of this object, and their numbers there."""
        generation = self.place[1]
        live = [i for i, matcher in enumerate(matchers) if matcher.place[1] == generation]
        return live, [matchers[i].place[0] for i in live]

    def _batch(self, method: str, *arguments: Any) -> Any:
        # Once: the numbers mean nothing to a new process.
        return self._send_once(lambda target: Call(target, method, list(arguments)))[0]


def _masks(data: Any, num_rows: int, num_words: int) -> Any:
    if not isinstance(data, bytes) or len(data) != num_rows * num_words * 4:
        raise unexpected(data, f"{num_rows} masks of {num_words} words")
    return np.frombuffer(data, np.int32).reshape(num_rows, num_words)


def _spread(results: Any, live: Sequence[int], count: int) -> list[bool | None]:
    if not isinstance(results, list) or len(results) != len(live):
        raise unexpected(results, f"a result for each of {len(live)} matchers")
    spread: list[bool | None] = [None] * count
    for i, result in zip(live, results, strict=True):
        spread[i] = result
    return spread


CLASSES: dict[type, type[_Remote]] = {
    t.GrammarCompiler: _RemoteCompiler,
    t.GrammarMatcher: _RemoteMatcher,
}


@lru_cache(maxsize=64)
def _class_of(contract: type, optional: tuple[type, ...]) -> type[_Remote]:
    """Return the class of proxies for objects of ``contract`` and of some optional protocols."""
    base = CLASSES.get(contract, _Remote)
    body: dict[str, Any] = {name: _property(name) for name in attributes(contract)}
    body |= {m.name: _member(m) for c in (contract, *optional) for m in members(c)}
    return type(
        f"Isolated{contract.__name__}",
        (base,),
        {name: member for name, member in body.items() if not hasattr(base, name)},
    )


def _property(name: str) -> property:
    return property(lambda self: self._read(name))


def _member(member: Member) -> Any:
    if member.is_property:
        return _property(member.name)
    built = getattr(t, member.returns, None)
    if inspect.isclass(built) and is_protocol(built):
        return lambda self, *args, **named: self._build(built, member.name, *args, **named)
    return lambda self, *args, **named: self._call(member.name, *args, **named)
