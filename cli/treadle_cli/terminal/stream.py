"""Following one answer while it is generated."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from treadle_cli.terminal.interrupt import Interrupt
from treadle_cli.terminal.screen import Screen

if TYPE_CHECKING:
    from collections.abc import Generator

    from treadle.outputs import RequestOutput

__all__ = ("Answer", "follow")


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of one request. ``stopped`` if the user ended it, ``error`` if it failed.

    ``ttft`` is the time to the first token in seconds, ``None`` if there was no token.
    """

    text: str
    tokens: int
    seconds: float
    ttft: float | None
    reason: str | None
    stopped: bool
    error: str | None = None

    def summary(self) -> str:
        """One line of figures. The rate counts from the first token on."""
        parts = [f"{self.tokens} tokens", f"{self.seconds:.1f} s"]
        if self.ttft is not None:
            parts.append(f"first after {self.ttft * 1000:.0f} ms")
            if self.tokens > 1 and self.seconds > self.ttft:
                parts.append(f"{(self.tokens - 1) / (self.seconds - self.ttft):.1f} tok/s")
        if self.stopped:
            parts.append("stopped")
        elif self.reason and self.reason != "stop":
            parts.append(f"ended by {self.reason}")
        return ", ".join(parts)


def follow(updates: Iterator[RequestOutput], screen: Screen) -> Answer:
    """Write the deltas of one request as they come; Ctrl-C closes the stream, which aborts it."""
    stream = cast("Generator[RequestOutput, None, None]", updates)
    pieces: list[str] = []
    tokens, start_time = 0, time.perf_counter()
    ttft: float | None = None
    reason: str | None = None
    error: str | None = None
    with Interrupt() as interrupt, closing(stream):
        for update in _until_interrupted(stream, interrupt):
            for output in update.outputs:
                tokens += len(output.token_ids)
                reason = output.finish_reason or reason
                error = output.error or error
                if output.token_ids and ttft is None:
                    ttft = time.perf_counter() - start_time
                if output.text:
                    pieces.append(output.text)
                    screen.text(output.text)
        stopped = interrupt.is_interrupted
    return Answer(
        text="".join(pieces),
        tokens=tokens,
        seconds=time.perf_counter() - start_time,
        ttft=ttft,
        reason=reason,
        stopped=stopped and reason is None,
        error=error,
    )


def _until_interrupted(
    updates: Iterator[RequestOutput], interrupt: Interrupt
) -> Iterator[RequestOutput]:
    for update in updates:
        yield update
        if interrupt.is_interrupted:
            return
