"""The result of a run as a picture: distributions, requests over time, tokens per second."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from treadle.errors import ConfigError
from treadle_cli.bench.serve.measure import Record, ServeResult

__all__ = ("check_plot", "draw")

BINS = 60
MAX_BARS = 400
BLUE, ORANGE, GREY = "#3465a4", "#d9822b", "#888888"


def check_plot(path: Path) -> None:
    """Raise ``ConfigError`` if no picture can be drawn, before anything is measured."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed; pip install matplotlib"
        ) from error
    if path.suffix != ".png":
        raise ConfigError(f"--plot is {str(path)!r}; the picture is a .png file")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot is {str(path)!r}; its folder does not exist")


def draw(path: Path, result: ServeResult, records: Sequence[Record]) -> None:
    """Write the PNG. Raises ``ConfigError`` if the file cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    answered = sorted((r for r in records if r.error is None), key=lambda r: r.start)
    times = [record.seconds for record in answered]
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots(2, 2)
    _distribution(axes[0][0], "time to first token", [t["ttft"] for t in times if "ttft" in t])
    gaps = [gap for record in answered for gap in record.gaps]
    _distribution(axes[0][1], "time between tokens", gaps)
    _timeline(axes[1][0], answered)
    _throughput(axes[1][1], answered, result.wall_seconds)
    rate = f"{result.request_rate:g} requests/s" if result.request_rate else "all at once"
    figure.suptitle(
        f"{result.model}: {result.completed} of {result.requests} requests, {rate}, "
        f"{result.output_tokens_per_second:.0f} output tok/s"
    )
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ConfigError(f"--plot {path} cannot be written: {error.strerror}") from error


def _distribution(axes: Any, title: str, seconds: Sequence[float]) -> None:
    """The share of values up to each time, with p50, p90 and p99."""
    values = sorted(1000 * value for value in seconds)
    axes.set_title(title)
    axes.set_xlabel("milliseconds")
    axes.set_ylabel("share")
    axes.set_ylim(0, 1.1)
    if not values:
        return
    shares = [(i + 1) / len(values) for i in range(len(values))]
    axes.step(values, shares, where="post", color=BLUE)
    for share in (0.5, 0.9, 0.99):
        value = values[min(len(values) - 1, int(share * len(values)))]
        axes.plot([value], [share], "o", color=ORANGE, markersize=4)
        label = (
            f"p{100 * share:.0f} {value:.0f}" if value >= 10 else f"p{100 * share:.0f} {value:.1f}"
        )
        # Above the curve on its right half, below it on the left: so a label stays in the picture.
        side = "right" if value > values[-1] / 2 else "left"
        offset = (-4, 5) if side == "right" else (6, -9)
        axes.annotate(label, (value, share), xytext=offset, textcoords="offset points", ha=side)
    axes.set_xlim(left=min(0, values[0]))
    axes.grid(alpha=0.3)


def _timeline(axes: Any, records: Sequence[Record]) -> None:
    """A line for each request: waiting for the first token, then its text."""
    axes.set_title("requests")
    axes.set_xlabel("seconds")
    axes.set_ylabel("request")
    shown = records[:: max(1, len(records) // MAX_BARS)]
    for i, record in enumerate(shown):
        first = record.end if record.first is None else record.first
        axes.plot([record.start, first], [i, i], color=ORANGE, linewidth=1.5)
        axes.plot([first, record.end], [i, i], color=BLUE, linewidth=1.5)
    axes.plot([], [], color=ORANGE, label="until the first token")
    axes.plot([], [], color=BLUE, label="until the end")
    axes.legend(loc="upper left", fontsize=8)


def _throughput(axes: Any, records: Sequence[Record], wall: float) -> None:
    """Events with text per second, and how many requests ran."""
    axes.set_title("tokens over time")
    axes.set_xlabel("seconds")
    axes.set_ylabel("tokens per second", color=BLUE)
    width = max(wall, 1e-9) / BINS
    counts = [0] * BINS
    for record in records:
        if record.first is not None:
            now = record.first
            for gap in (0.0, *record.gaps):
                now += gap
                counts[min(BINS - 1, max(0, int(now / width)))] += 1
    middles = [(i + 0.5) * width for i in range(BINS)]
    running = [sum(r.start <= middle < r.end for r in records) for middle in middles]
    axes.plot(middles, [count / width for count in counts], color=BLUE)
    axes.set_ylim(bottom=0)
    others = axes.twinx()
    others.plot(middles, running, color=GREY, linestyle=":")
    others.set_ylabel("requests at a time", color=GREY)
    others.set_ylim(bottom=0)
