"""Messages between the API process and the engine process.

Each frame is one of these Structs as msgpack. Any other content is an error, so a sender cannot
make the receiver create arbitrary objects.
"""

from __future__ import annotations

import msgspec

from treadle.api.requests import EngineRequest, TokenOutput
from treadle.api.stats import EngineStats
from treadle.api.step_types import EngineInfo
from treadle.config import EngineConfig
from treadle.processes.failure import Failure

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
)

# To the engine. ``StartEngine`` is the first message and is sent once.


class StartEngine(msgspec.Struct, frozen=True, array_like=True, tag=True):
    config: EngineConfig
    log_level: int


class AddRequests(msgspec.Struct, frozen=True, array_like=True, tag=True):
    requests: list[EngineRequest]


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

_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_reports: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)
decode_command = _commands.decode
decode_report = _reports.decode
