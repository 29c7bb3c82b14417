"""What the API process and the engine process say to each other.

Frames on a stream socket: four bytes of length, then one msgpack message. Only the Structs below
can travel; a frame that is none of them is an error, never an object of its sender's choosing.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from treadle import errors
from treadle.api.requests import EngineRequest, TokenOutput
from treadle.api.stats import EngineStats
from treadle.api.step_types import EngineFacts
from treadle.config import EngineConfig
from treadle.errors import EngineError, RequestError, TreadleError

__all__ = (
    "Abort",
    "Add",
    "Command",
    "Dead",
    "Failure",
    "Frames",
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
    "frame",
)

PREFIX = 4
LONGEST_FRAME = 256 * 2**20

# Names on the wire become classes through this table only.
ERRORS: dict[str, type[TreadleError]] = {
    name: kind for name in errors.__all__ if issubclass(kind := getattr(errors, name), TreadleError)
}


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """An error on its way to the other process."""

    kind: str
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Errors that are not treadle's own become an ``EngineError`` that names their type."""
        kind = type(error).__name__
        if isinstance(error, TreadleError) and kind in ERRORS:
            return cls(kind, str(error), getattr(error, "param", None))
        return cls("EngineError", f"{kind}: {error}" if str(error) else kind)

    def error(self) -> TreadleError:
        kind = ERRORS.get(self.kind, EngineError)
        if issubclass(kind, RequestError):
            return kind(self.message, param=self.param)
        return kind(self.message)


# To the engine. ``Start`` is the first message and comes once.


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
    """End now; what runs is dropped."""


Command = Start | Add | Abort | Ping | Stop


# From the engine. ``Ready`` or ``Dead`` is the first message.


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    facts: EngineFacts


class Steps(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Everything that one step produced."""

    outputs: list[TokenOutput]


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The engine did not take a sequence."""

    id: str
    failure: Failure


class Pong(msgspec.Struct, frozen=True, array_like=True, tag=True):
    number: int
    stats: EngineStats


class Dead(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The last message: the engine could not start or cannot go on."""

    failure: Failure


Report = Ready | Steps | Refused | Pong | Dead

_encoder = msgspec.msgpack.Encoder()
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_reports: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)
decode_command = _commands.decode
decode_report = _reports.decode


def frame(message: Command | Report) -> bytearray:
    """A message as it goes on the wire. Raises ``RequestError`` if it is too long to be sent."""
    data = bytearray(PREFIX)
    _encoder.encode_into(message, data, PREFIX)
    size = len(data) - PREFIX
    if size > LONGEST_FRAME:
        raise RequestError(
            f"a message to the engine has {size} bytes; at most {LONGEST_FRAME} are allowed: send "
            "shorter prompts"
        )
    data[:PREFIX] = size.to_bytes(PREFIX, "little")
    return data


class Frames:
    """Cuts a stream of bytes into the payloads of its frames."""

    __slots__ = ("_data",)

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Take what was received and yield the payloads that are complete. Exhaust it.

        Raises ``EngineError`` for a frame that nobody of ours would send.
        """
        buffer = self._data
        buffer += data
        at = 0
        while len(buffer) - at >= PREFIX:
            size = int.from_bytes(buffer[at : at + PREFIX], "little")
            if size > LONGEST_FRAME:
                raise EngineError(
                    f"received a frame of {size} bytes; at most {LONGEST_FRAME} are allowed"
                )
            end = at + PREFIX + size
            if len(buffer) < end:
                break
            yield bytes(buffer[at + PREFIX : end])
            at = end
        if at:
            del buffer[:at]
