"""Messages between the API process and the engine process.

Each frame is one of these Structs as msgpack. Any other content is an error, so a sender cannot
make the receiver create arbitrary objects.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec.msgpack import Decoder

from treadle.api.requests import EngineRequest, TokenOutput
from treadle.api.stats import EngineStats
from treadle.api.step_types import EngineInfo
from treadle.config import EngineConfig
from treadle.errors import EngineError, RequestError
from treadle.processes.failure import Failure
from treadle.processes.framing import MAX_FRAME_BYTES

__all__ = (
    "AbortRequests",
    "AddRequests",
    "Command",
    "EngineFailed",
    "EngineReady",
    "Ping",
    "Pong",
    "Report",
    "RequestRejected",
    "StartEngine",
    "StepOutputs",
    "StopEngine",
    "decode_command",
    "decode_report",
    "decode_request",
    "encode_request",
    "request_id",
)

# To the engine. ``StartEngine`` is the first message and is sent once.


class StartEngine(msgspec.Struct, frozen=True, array_like=True, tag=True):
    config: EngineConfig


class AddRequests(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Requests to add. Each is encoded by itself, so that a bad one cannot take others with it."""

    requests: list[msgspec.Raw]


class AbortRequests(msgspec.Struct, frozen=True, array_like=True, tag=True):
    ids: list[str]


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=True):
    number: int


class StopEngine(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """End now; running requests are dropped."""


Command = StartEngine | AddRequests | AbortRequests | Ping | StopEngine


# From the engine. ``EngineReady`` or ``EngineFailed`` is the first message.


class EngineReady(msgspec.Struct, frozen=True, array_like=True, tag=True):
    info: EngineInfo


class StepOutputs(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The outputs of one step."""

    outputs: list[TokenOutput]


class RequestRejected(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The engine did not accept a sequence."""

    id: str
    failure: Failure


class Pong(msgspec.Struct, frozen=True, array_like=True, tag=True):
    number: int
    stats: EngineStats


class EngineFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The last message: the engine failed to start or cannot continue."""

    failure: Failure


Report = EngineReady | StepOutputs | RequestRejected | Pong | EngineFailed

decode_request: Callable[[msgspec.Raw], EngineRequest] = Decoder(EngineRequest).decode
decode_command: Callable[[bytes], Command] = Decoder(Command).decode
decode_report: Callable[[bytes], Report] = Decoder(Report).decode


def encode_request(request: EngineRequest) -> msgspec.Raw:
    """Return ``request`` as the msgpack of ``AddRequests``.

    Raises ``RequestError`` if msgpack cannot carry a value: an integer beyond 64 bits, a lone
    surrogate, too deep nesting, a type that is not JSON's; or if it is too long for a frame.
    """
    try:
        data = msgspec.msgpack.encode(request)
    except (OverflowError, RecursionError, TypeError, ValueError) as error:
        raise RequestError(f"a parameter of the request cannot be sent: {error}") from error
    if len(data) > MAX_FRAME_BYTES // 2:
        raise RequestError(
            f"the request has {len(data)} bytes; at most {MAX_FRAME_BYTES // 2} are allowed: send a "
            "shorter prompt"
        )
    return msgspec.Raw(data)


def request_id(data: msgspec.Raw) -> str:
    """Return the id of a request that does not decode as one. Raises ``EngineError``."""
    try:
        fields = msgspec.msgpack.decode(data)
    except (ValueError, RecursionError) as error:
        raise EngineError(f"a request is not valid msgpack: {error}") from error
    if not (isinstance(fields, list) and fields and isinstance(fields[0], str)):
        raise EngineError("a request has no id")
    return fields[0]
