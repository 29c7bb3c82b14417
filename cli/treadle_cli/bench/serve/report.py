"""The result of a run as a person reads it, in 40 columns and more."""

from __future__ import annotations

from collections.abc import Iterator

from treadle_cli.bench.serve.measure import ServeResult

__all__ = ("report", "warnings_of")

ROWS = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "itl_ms": "ITL", "e2el_ms": "E2EL"}
BUSY = 0.8
LATE_MS = 50.0


def report(result: ServeResult) -> str:
    """Return the figures as lines."""
    return "\n".join(lines(result))


def lines(result: ServeResult) -> Iterator[str]:
    yield f"{result.model}, {result.dataset} on {result.endpoint}"
    yield f"{'requests':<20}{result.completed} of {result.requests} answered"
    yield f"{'wall time':<20}{result.wall_seconds:.2f} s"
    yield f"{'most at a time':<20}{result.peak_concurrency}"
    yield f"{'prompt tokens':<20}{result.prompt_tokens}"
    yield f"{'output tokens':<20}{result.output_tokens}"
    yield f"{'requests/s':<20}{result.requests_per_second:.2f}"
    yield f"{'output tok/s':<20}{result.output_tokens_per_second:.1f}"
    yield f"{'total tok/s':<20}{result.total_tokens_per_second:.1f}"
    if result.goodput is not None:
        share = 100 * result.goodput.requests / result.requests
        yield f"{'good requests/s':<20}{result.goodput.requests_per_second:.2f} ({share:.0f} %)"
    yield ""
    yield f"{'ms':<5}" + "".join(f"{name:>8}" for name in ("p50", "p90", "p99", "mean"))
    for field, name in ROWS.items():
        stats = getattr(result, field)
        values = (stats.p50, stats.p90, stats.p99, stats.mean)
        yield f"{name:<5}" + "".join(f"{value:>8.1f}" for value in values)
    yield ""
    client = result.client
    yield f"{'client CPU':<20}{100 * client.cpu_share:.0f} % of a core"
    yield f"{'client can read':<20}{client.readable_tokens_per_second:.0f} tok/s"


def warnings_of(result: ServeResult) -> Iterator[str]:
    """What makes the figures doubtful."""
    for message, count in result.errors.items():
        yield f"{count} requests failed: {message}"
    client = result.client
    speed = result.output_tokens_per_second
    if client.cpu_share > BUSY or speed > BUSY * client.readable_tokens_per_second:
        yield (
            f"the client was busy: it used {100 * client.cpu_share:.0f} % of a core and read "
            f"{speed:.0f} of the {client.readable_tokens_per_second:.0f} tok/s that it can; the "
            "server may be faster than these figures"
        )
    if result.max_concurrency is None and client.late_ms.p99 > LATE_MS:
        yield (
            f"requests were sent up to {client.late_ms.max:.0f} ms late: the client was too slow "
            "for this rate"
        )
    elif result.request_rate is not None and client.late_ms.p99 > 1000:
        yield (
            f"requests waited up to {client.late_ms.max / 1000:.1f} s for --max-concurrency, which "
            "TTFT does not count: the server is slower than --request-rate"
        )
    if not result.prompt_tokens:
        yield "the server counts no prompt tokens: lengths of prompts are only words"
