"""A grammar backend whose masks are hashes, and the process whose forks compile with it."""

from __future__ import annotations

import signal
import zlib
from collections.abc import Collection
from typing import Any

import msgspec
import numpy as np

from simulator.threads import sleep
from simulator.world import World
from treadle.api.structured_output import GrammarSpec
from treadle.processes.fork_server import ForkServer
from treadle.processes.isolated import ProcessExit
from treadle.structured_output.checker import CheckResult, _CheckRequest

__all__ = ("Compiler", "Matcher", "SimulatedForks")

VOCAB = 64
COSTS = {"slow": 0.9, "endless": 1000.0}
"""Seconds of CPU time; other grammars are quick."""


class Matcher:
    """``source`` is ``<name>-<first length that may end>-<last>``; "stuck" raises on the way."""

    def __init__(self, source: str) -> None:
        name, first, last = source.split("-")
        self._name, self._seed = name, zlib.crc32(source.encode())
        self._first, self._last = int(first), int(last)
        self._count = 0
        self._state = self._seed

    def mask(self) -> int:
        """The allowed ids as bits: never none, and never the id that ends."""
        bits = hash((self._state, self._count)) & (2**61 - 1)
        return (bits | 1 << (self._state % (VOCAB - 1))) & ~(1 << (VOCAB - 1))

    def allowed(self, stop_ids: Collection[int]) -> list[int]:
        bits = self.mask()
        for token in stop_ids:
            if self.is_accepting:
                bits |= 1 << token
        return [i for i in range(VOCAB) if bits >> i & 1]

    def accept(self, token: int) -> bool:
        self.accept_token(token)
        return self.is_terminated

    # -- the protocol -------------------------------------------------------------------

    def fill_bitmask(self, bitmask: Any, row: int) -> None:
        if self._name == "stuck" and self._count == 2:
            raise RuntimeError("the matcher is stuck")
        words = np.array([self.mask()], dtype="<u8").view(np.int32)
        bitmask[row].numpy()[:] = words

    def accept_token(self, token: int) -> bool:
        if not self.mask() >> token & 1:
            return False
        self._state = hash((self._state, token)) & (2**61 - 1)
        self._count += 1
        return True

    def rollback(self, count: int) -> None:
        raise NotImplementedError

    @property
    def is_accepting(self) -> bool:
        return self._count >= self._first

    @property
    def is_terminated(self) -> bool:
        return self._count >= self._last


class _Grammar:
    def __init__(self, source: str) -> None:
        self._source = source

    def matcher(self) -> Matcher:
        return Matcher(self._source)


class Compiler:
    name = "simulated"

    def unsupported_reason(self, spec: GrammarSpec) -> str | None:
        return "it is not supported" if spec.source.startswith("refused") else None

    def compile(self, spec: GrammarSpec) -> _Grammar:
        return _Grammar(spec.source)


class SimulatedForks(ForkServer):
    """The process of a backend: each request takes its time, and then has an answer or none."""

    def __init__(self, world: World, entry: str, hello: bytes | None = None) -> None:
        super().__init__(entry, hello)
        self._world = world

    def start(self) -> None:
        sleep(self._world, self._world.random.random())

    def _request(self, payload: bytes, seconds: float) -> bytes:
        world, num_closes = self._world, self._num_closes
        question = msgspec.msgpack.decode(payload, type=_CheckRequest)
        spec, limit = question.spec, question.seconds
        cost = COSTS.get(spec.source.partition("-")[0], 0.001 + world.random.random() * 0.02)
        draw = world.random.random()
        if draw < 0.02:
            world.log("grammar fork hangs", spec.source)
            world.grammar_faults.add(spec.source)
            sleep(world, seconds)
            raise TimeoutError("timed out")
        sleep(world, min(cost, limit) * (1 + world.random.random()))
        if draw < 0.08 or self._num_closes != num_closes:
            world.log("grammar fork is killed", spec.source)
            world.grammar_faults.add(spec.source)
            raise ProcessExit(-signal.SIGKILL)
        if cost > limit:
            raise ProcessExit(-signal.SIGPROF)
        if spec.source.startswith("wrong"):
            return msgspec.msgpack.encode(CheckResult(error="it is wrong"))
        refusal = Compiler().unsupported_reason(spec)
        return msgspec.msgpack.encode(CheckResult(100, cost, refusal))
