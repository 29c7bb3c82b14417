"""What executor and workers say to each other: msgspec Structs as msgpack over pipes, no pickle."""

from __future__ import annotations

import msgspec

from weft.config import EngineConfig
from weft.engine.plan import EngineFacts, StepEdits, StepPlan, StepResult
from weft.plugins import Plan

__all__ = (
    "Collect",
    "Collected",
    "Failed",
    "Launch",
    "Sample",
    "Start",
    "Started",
    "Stop",
    "decode_answer",
    "decode_order",
    "encode",
)


class Start(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The first order of a worker; ``meeting`` is the file in which the ranks find each other."""

    rank: int
    size: int
    config: EngineConfig
    plan: Plan
    meeting: str


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
