"""What an executor and its workers say to each other: msgspec Structs as msgpack, never pickle.

How the bytes travel is the executor's business.
"""

from __future__ import annotations

import msgspec

from treadle import errors
from treadle.api.step_types import EngineFacts, StepEdits, StepPlan, StepResult
from treadle.config import EngineConfig
from treadle.plugins import PluginSelection

__all__ = (
    "Answer",
    "Collect",
    "Collected",
    "Failed",
    "Launch",
    "Order",
    "Sample",
    "Start",
    "Started",
    "Stop",
    "decode_answer",
    "decode_order",
    "encode",
)


class Start(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The first order of a worker."""

    rank: int
    size: int
    config: EngineConfig
    plan: PluginSelection
    meeting: str
    """Where the ranks find each other, in words that the executor and its workers agree on."""
    device: int = 0
    """Which of the CUDA devices that this worker sees is its own."""
    neighbours: int = 1
    """How many workers share the cores of this machine, this one included."""


class Launch(msgspec.Struct, frozen=True, tag=True, array_like=True):
    plan: StepPlan


class Sample(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Complete the held step that was launched last."""

    edits: StepEdits | None


class Collect(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Wait for the oldest launched step; rank 0 answers with its ``StepResult``."""


class Stop(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class Started(msgspec.Struct, frozen=True, tag=True, array_like=True):
    facts: EngineFacts


class Collected(msgspec.Struct, frozen=True, tag=True, array_like=True):
    result: StepResult


class Failed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A worker cannot go on; ``kind`` is the class of the error."""

    kind: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        return cls(type(error).__name__, str(error))

    @property
    def own(self) -> errors.TreadleError | None:
        """The error itself, if it is one of treadle's: the user can mend what it says."""
        kind = getattr(errors, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, errors.TreadleError):
            return kind(self.message)
        return None

    def error(self, rank: int, *, serving: bool) -> errors.TreadleError:
        """What an executor raises: the worker's own error at start; later the engine is lost."""
        if not serving and (own := self.own) is not None:
            return own
        return errors.EngineDeadError(f"rank {rank} failed: {self.kind}: {self.message}")


Order = Start | Launch | Sample | Collect | Stop
Answer = Started | Collected | Failed

_ENCODER = msgspec.msgpack.Encoder()
_ORDERS = msgspec.msgpack.Decoder(Order)
_ANSWERS = msgspec.msgpack.Decoder(Answer)


def encode(message: Order | Answer) -> bytes:
    return _ENCODER.encode(message)


def decode_order(data: bytes) -> Order:
    order: Order = _ORDERS.decode(data)
    return order


def decode_answer(data: bytes) -> Answer:
    answer: Answer = _ANSWERS.decode(data)
    return answer
