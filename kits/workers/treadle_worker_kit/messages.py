"""Commands and replies of workers: msgspec Structs as msgpack, never pickle.

The executor decides how the bytes travel.
"""

from __future__ import annotations

import msgspec

from treadle import errors
from treadle.api.step_types import EngineInfo, GrammarOutput, ModelRunnerOutput, SchedulerOutput
from treadle.config import EngineConfig
from treadle.plugins import PluginSelection

__all__ = (
    "Collect",
    "Collected",
    "Failed",
    "Launch",
    "Progress",
    "Sample",
    "StartWorker",
    "Started",
    "Stop",
    "WorkerCommand",
    "WorkerReply",
    "decode_command",
    "decode_reply",
    "encode",
)


class StartWorker(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The first command of a worker."""

    rank: int
    world_size: int
    config: EngineConfig
    plan: PluginSelection
    rendezvous: str
    """Where the ranks find each other, in a form that the executor and its workers agree on."""
    local_rank: int = 0
    """The index of this worker's device among the CUDA devices that it sees."""
    local_world_size: int = 1
    """How many workers share the cores of this machine, this one included."""


class Launch(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Enqueue one step."""

    scheduler_output: SchedulerOutput


class Sample(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Complete the held step that was launched last."""

    grammar_output: GrammarOutput | None


class Collect(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Wait for the oldest launched step; rank 0 replies with its ``ModelRunnerOutput``."""


class Stop(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Leave the group of ranks."""


class Progress(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Where the start of a rank is. Workers may send any number of these before ``Started``."""

    stage: str
    is_waiting: bool = False
    """Whether the rank waits, on the host, until the others are as far."""


class Started(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The model is loaded."""

    info: EngineInfo


class Collected(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The result of a step."""

    result: ModelRunnerOutput


class Failed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A worker cannot continue; ``error_class`` is the name of the error's class."""

    error_class: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        """Return the reply for ``error``."""
        return cls(type(error).__name__, str(error))

    @property
    def treadle_error(self) -> errors.TreadleError | None:
        """The error itself if its class is in ``treadle.errors``: the user can act on it."""
        error_type = getattr(errors, self.error_class, None)
        if isinstance(error_type, type) and issubclass(error_type, errors.TreadleError):
            return error_type(self.message)
        return None

    def error(self, rank: int, *, stage: str | None) -> errors.TreadleError:
        """Return what the executor raises: the error itself at start, ``EngineDeadError`` later.

        ``stage`` is that of the start, ``None`` after it.
        """
        if stage is not None and (error := self.treadle_error) is not None:
            return error
        where = "" if stage is None else f" in stage {stage!r} of the start"
        return errors.EngineDeadError(
            f"rank {rank} failed{where}: {self.error_class}: {self.message}"
        )


WorkerCommand = StartWorker | Launch | Sample | Collect | Stop
WorkerReply = Progress | Started | Collected | Failed

_ENCODER = msgspec.msgpack.Encoder()
_COMMANDS = msgspec.msgpack.Decoder(WorkerCommand)
_REPLIES = msgspec.msgpack.Decoder(WorkerReply)


def encode(message: WorkerCommand | WorkerReply) -> bytes:
    """Return the bytes of a message."""
    return _ENCODER.encode(message)


def decode_command(data: bytes) -> WorkerCommand:
    """Return the command in ``data``. Raises ``msgspec.DecodeError``."""
    command: WorkerCommand = _COMMANDS.decode(data)
    return command


def decode_reply(data: bytes) -> WorkerReply:
    """Return the reply in ``data``. Raises ``msgspec.DecodeError``."""
    reply: WorkerReply = _REPLIES.decode(data)
    return reply
