"""What travels between a server and the process of an isolated plugin, as msgpack.

Plain values, and of ``treadle.api.types`` the data classes by their names: nothing else becomes an
object, whatever the other process sends. A tuple arrives as a list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec.msgpack import Ext

from treadle.api import types
from treadle.processes.failure import Failure

__all__ = ("POLL", "Call", "Hello", "ObjectHandle", "Reply", "decode", "encode", "pack")

POLL = "poll"
"""The method of what stands for a call that is made beside others: ``[0, result]`` once there is one, and
until then its number and nothing."""

_DATA, _SET, _PATH, _KEPT, _TOKENIZER = range(1, 6)
_PLAIN = (type(None), bool, int, float, str, bytes)
_encoder = msgspec.msgpack.Encoder()


class Hello(msgspec.Struct, array_like=True):
    """The first message to a new process: which plugin it imports, with how much memory."""

    kind: str
    key: str
    target: str
    dist: str
    version: str
    file: str | None
    memory: int


class Call(msgspec.Struct, array_like=True):
    """A call of ``method`` of the object ``target``, or of a hook if that is 0.

    A property is a call with ``read``. ``freed`` are objects that nobody refers to any more. ``builds``
    names the protocol of a result that stays in the process. ``beside`` is a call in a thread of its
    own, whose result is polled, so that others need not wait for it. In the other direction it is a
    call of the tokenizer, which is made while a call is answered.
    """

    target: int
    method: str
    arguments: list[Any] = []
    named: dict[str, Any] = {}
    read: bool = False
    freed: list[int] = []
    builds: str = ""
    beside: bool = False


class Reply(msgspec.Struct, array_like=True):
    """The result of a call, or how it failed, or a call of the tokenizer that must come before.

    ``error`` is the type of an exception that is not treadle's; ``failure`` has its text.
    """

    value: Any = None
    failure: Failure | None = None
    error: str = ""
    callback: Call | None = None


class ObjectHandle(msgspec.Struct, array_like=True):
    """What a hook or a method has built: the number of the object, and the optional protocols that it
    has."""

    target: int
    optional: list[str]


def pack(value: Any, keep: Callable[[Any], int] | None = None, tokenizer: object = None) -> Any:
    """Return ``value`` with what msgpack does not know as extensions. Raises ``TypeError``.

    ``keep`` numbers a text of a type of its own, which the other process may only pass back;
    ``tokenizer`` stands for itself.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if tokenizer is not None and value is tokenizer:
        return Ext(_TOKENIZER, b"")
    if isinstance(value, Kept):
        return Ext(_KEPT, _encoder.encode([value.number, str(value)]))
    if isinstance(value, str):
        if keep is None:
            return str(value)
        return Ext(_KEPT, _encoder.encode([keep(value), str(value)]))
    if isinstance(value, (int, float, bytes)):
        plain: Any = next(t for t in (int, float, bytes) if isinstance(value, t))
        return plain(value)
    if isinstance(value, Path):
        return Ext(_PATH, str(value).encode())
    if isinstance(value, Mapping):
        return {str(k): pack(v, keep, tokenizer) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [pack(item, keep, tokenizer) for item in value]
    if isinstance(value, Set):
        return Ext(_SET, _encoder.encode([pack(item, keep, tokenizer) for item in value]))
    if is_dataclass(value) and getattr(types, kind.__name__, None) is kind:
        parts = [pack(getattr(value, f.name), keep, tokenizer) for f in fields(value)]
        return Ext(_DATA, _encoder.encode([kind.__name__, parts]))
    raise TypeError(f"{value!r:.80} cannot be sent to another process")


class Kept(str):
    """A text of which child ``generation`` keeps the original, under ``number``."""

    number: int
    generation: int


def encode(message: msgspec.Struct) -> bytes:
    """Return a message whose values were packed."""
    return _encoder.encode(message)


def decode(
    data: bytes,
    type_: Any,
    *,
    kept: Callable[[int, str], Any],
    tokenizer: object = None,
) -> Any:
    """Return a message. Raises ``msgspec.MsgspecError``, ``TypeError`` and ``ValueError``.

    ``kept`` returns what stands for a text that the other process, or this one, keeps.
    """

    def extension(code: int, body: memoryview) -> Any:
        if code == _TOKENIZER and tokenizer is not None:
            return tokenizer
        if code == _PATH:
            return Path(bytes(body).decode())
        value = decoder.decode(body)
        if code == _SET:
            return frozenset(value)
        name, parts = value
        if code == _KEPT:
            return kept(name, parts)
        class_ = getattr(types, name, None)
        if code != _DATA or not (isinstance(class_, type) and is_dataclass(class_)):
            raise ValueError(
                f"a message names {name!r:.80}, which is not data of treadle.api.types"
            )
        return class_(*parts)

    decoder = msgspec.msgpack.Decoder(ext_hook=extension)
    return msgspec.msgpack.Decoder(type_, ext_hook=extension).decode(data)
