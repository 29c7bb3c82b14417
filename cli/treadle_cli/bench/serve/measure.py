"""What is measured of each request, and what a run of them amounts to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from treadle.errors import ConfigError
from treadle_cli.bench.percentiles import LatencyStats, summarize

__all__ = ("ClientStats", "Goodput", "Record", "ServeResult", "parse_goodput", "summarize_run")

OBJECTIVES = ("ttft", "tpot", "e2el")
MAX_ERROR_KINDS = 5


@dataclass(slots=True)
class Record:
    """One request. Times are seconds since the start of the run; ``due`` is when it should begin."""

    due: float = 0.0
    start: float = 0.0
    first: float | None = None
    last: float = 0.0
    end: float = 0.0
    gaps: list[float] = field(default_factory=list)
    """Between the events with text."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    def arrived(self, now: float) -> None:
        """Note an event with text."""
        if self.first is None:
            self.first = now
        else:
            self.gaps.append(now - self.last)
        self.last = now

    @property
    def seconds(self) -> dict[str, float]:
        """The objectives of a request that was answered; ``tpot`` needs two tokens."""
        values = {"e2el": self.end - self.start}
        if self.first is not None:
            values["ttft"] = self.first - self.start
            if self.output_tokens > 1:
                values["tpot"] = (self.last - self.first) / (self.output_tokens - 1)
        return values


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that met every objective."""

    objectives_ms: dict[str, float]
    requests: int
    requests_per_second: float


class ClientStats(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the client could keep up, so that the figures are the server's."""

    cpu_share: float
    """Of one core."""
    readable_tokens_per_second: float
    """Streamed events that this client can read on this machine, measured before the run."""
    late_ms: LatencyStats
    """How much later than planned requests were sent. Waiting for ``max_concurrency`` counts."""


class ServeResult(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Rates are per second of ``wall_seconds``, from the first request to the last answer."""

    kind: str = "serve"
    date: str
    base_url: str
    model: str
    endpoint: str
    dataset: str
    requests: int
    completed: int
    errors: dict[str, int]
    """Messages of failed requests, with how often each came."""
    wall_seconds: float
    prompt_tokens: int
    output_tokens: int
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    request_rate: float | None
    burstiness: float
    max_concurrency: int | None
    peak_concurrency: int
    ttft_ms: LatencyStats
    tpot_ms: LatencyStats
    itl_ms: LatencyStats
    e2el_ms: LatencyStats
    goodput: Goodput | None
    client: ClientStats


def parse_goodput(texts: Sequence[str]) -> dict[str, float]:
    """Read ``["ttft:200", "tpot:50"]`` or ``["ttft:200 tpot:50"]``. Raises ``ConfigError``."""
    objectives: dict[str, float] = {}
    for text in " ".join(texts).split():
        name, _, value = text.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = 0.0
        if name not in OBJECTIVES or not 0 < limit < float("inf"):
            raise ConfigError(
                f"--goodput is {text!r}; write NAME:MILLISECONDS with one of {', '.join(OBJECTIVES)}"
            )
        objectives[name] = limit
    return objectives


def summarize_run(
    records: Sequence[Record],
    wall: float,
    objectives: Mapping[str, float],
    **labels: Any,
) -> ServeResult:
    """Count and summarise. Failed requests count as such and are in no other figure."""
    answered = [record for record in records if record.error is None]
    times = [record.seconds for record in answered]
    prompt_tokens = sum(record.prompt_tokens for record in answered)
    output_tokens = sum(record.output_tokens for record in answered)
    wall = max(wall, 1e-9)
    goodput = None
    if objectives:
        good = sum(
            all(t.get(name, 0.0) * 1000 <= limit for name, limit in objectives.items())
            for t in times
        )
        goodput = Goodput(
            objectives_ms=dict(objectives),
            requests=good,
            requests_per_second=round(good / wall, 3),
        )
    return ServeResult(
        requests=len(records),
        completed=len(answered),
        errors=dict(
            Counter(r.error for r in records if r.error is not None).most_common(MAX_ERROR_KINDS)
        ),
        wall_seconds=round(wall, 6),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        requests_per_second=round(len(answered) / wall, 3),
        output_tokens_per_second=round(output_tokens / wall, 2),
        total_tokens_per_second=round((prompt_tokens + output_tokens) / wall, 2),
        peak_concurrency=peak(records),
        ttft_ms=summarize([t["ttft"] for t in times if "ttft" in t]),
        tpot_ms=summarize([t["tpot"] for t in times if "tpot" in t]),
        itl_ms=summarize([gap for record in answered for gap in record.gaps]),
        e2el_ms=summarize([t["e2el"] for t in times]),
        goodput=goodput,
        **labels,
    )


def peak(records: Sequence[Record]) -> int:
    """The most requests that ran at the same time."""
    running = most = 0
    changes = [(r.start, 1) for r in records] + [(r.end, -1) for r in records]
    for _, change in sorted(changes):
        running += change
        most = max(most, running)
    return most
