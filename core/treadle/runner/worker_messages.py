"""Messages between an executor and its workers: msgspec Structs as msgpack, never pickle.

The executor chooses the transport.
"""

from __future__ import annotations

import msgspec

from treadle import errors
from treadle.api.step_types import EngineFacts, StepEdits, StepPlan, StepResult
from treadle.config import EngineConfig
from treadle.plugins import Plan

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
    """The first command of a worker."""

    rank: int
    size: int
    config: EngineConfig
    plan: Plan
    meeting: str
    """Where the ranks connect to each other, in a format that the executor defines."""
    device: int = 0
    """Index of this worker's CUDA device among those visible to it."""
    neighbours: int = 1
    """Number of workers on this node, including this one."""


class Launch(msgspec.Struct, frozen=True, tag=True, array_like=True):
    plan: StepPlan


class Sample(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Complete the newest step, which has deferred sampling."""

    edits: StepEdits | None


class Collect(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Wait for the oldest step in flight. Rank 0 replies with its ``ModelRunnerOutput``."""


class Stop(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class Started(msgspec.Struct, frozen=True, tag=True, array_like=True):
    facts: EngineFacts


class Collected(msgspec.Struct, frozen=True, tag=True, array_like=True):
    result: StepResult


class Failed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A worker has failed. ``kind`` is the name of the error's class."""

    kind: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        return cls(type(error).__name__, str(error))

    @property
    def own(self) -> errors.TreadleError | None:
        """The error, if it is a ``TreadleError``; else ``None``."""
        kind = getattr(errors, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, errors.TreadleError):
            return kind(self.message)
        return None

    def error(self, rank: int, *, serving: bool) -> errors.TreadleError:
        """Return the error to raise: at startup the worker's, then ``EngineDeadError``."""
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
