"""Where grammars are ordered, compiled and filled into masks."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import TYPE_CHECKING

from weft.config import EngineConfig
from weft.engine.messages import EngineRequest
from weft.engine.plan import EngineFacts, StepEdits
from weft.errors import RequestError
from weft.guided.guide import Guide
from weft.plugins import Host

if TYPE_CHECKING:
    from weft.engine.request import Sequence

__all__ = ("GrammarDesk", "Ticket")


class Ticket:
    """A grammar that was ordered for one sequence."""

    def __init__(self, ready: Future[Guide]) -> None:
        self._ready = ready

    def guide(self) -> Guide | None:
        """The guide once it is ready, ``None`` until then. Raises ``RequestError``."""
        return self._ready.result() if self._ready.done() else None


class GrammarDesk:
    """Compiles the grammars of requests. No backend is installed with the core."""

    def __init__(self, config: EngineConfig, host: Host, facts: EngineFacts) -> None:
        self._host = host

    def submit(self, request: EngineRequest) -> Ticket:
        known = ", ".join(self._host.keys("guided")) or "none"
        raise RequestError(
            f"guided decoding needs a plugin of kind 'guided' (installed: {known})", param="guided"
        )

    def masks(self, rows: list[tuple[int, Sequence]]) -> StepEdits:
        raise RequestError("no grammar was compiled", param="guided")

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    def close(self) -> None:
        pass
