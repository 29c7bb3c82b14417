"""Messages between the API process and the engine process.

Each frame is one of these Structs as msgpack. Any other content is an error, so a sender cannot
make the receiver create arbitrary objects.
"""

from __future__ import annotations

import msgspec

from treadle.api.requests import EngineRequest, TokenOutput
from treadle.api.stats import EngineStats
from treadle.api.step_types import EngineFacts
from treadle.config import EngineConfig
from treadle.processes.failure import Failure

__all__ = (
    "Abort",
    "Add",
    "Command",
    "Dead",
    "Ping",
    "Pong",
    "Ready",
    "Refused",
    "Report",
    "Start",
    "Steps",
    "Stop",
    "decode_command",
    "decode_report",
)

# To the engine. ``StartEngine`` is the first message and is sent once.


class Start(msgspec.Struct, frozen=True, array_like=True, tag=True):
    config: EngineConfig
    log_level: int


class Add(msgspec.Struct, frozen=True, array_like=True, tag=True):
    requests: list[EngineRequest]


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=True):
    ids: list[str]


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=True):
    number: int


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """End now; running requests are dropped."""


Command = Start | Add | Abort | Ping | Stop


# From the engine. ``Ready`` or ``EngineFailed`` is the first message.


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    facts: EngineFacts


class Steps(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The outputs of one step."""

    outputs: list[TokenOutput]


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The engine did not accept a sequence."""

    id: str
    failure: Failure


class Pong(msgspec.Struct, frozen=True, array_like=True, tag=True):
    number: int
    stats: EngineStats


class Dead(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The last message: the engine failed to start or cannot continue."""

    failure: Failure


Report = Ready | Steps | Refused | Pong | Dead

_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_reports: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)
decode_command = _commands.decode
decode_report = _reports.decode
