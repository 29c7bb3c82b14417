"""Tables of what is in the repository, for the reference pages: shipped plugins and their options,
models, quantization, metrics, extras."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client.core import Metric
from repository import ROOT, Member, members

from treadle.api.stats import EngineStats
from treadle_cli.description import option_rows
from treadle_cli.option_examples import toml_example
from treadle_server import metric_names
from treadle_server.metric_values import MEASURED
from treadle_server.metrics import Metrics

__all__ = ("BLOCKS", "options_of")

RUNS = ROOT / "docs/data/runs"
CPU_SPEED = ROOT / "docs/data/cpu_speed.json"
QUANTIZED_SPEED = ROOT / "docs/data/quantized_speed.json"
PERPLEXITY = ROOT / "docs/data/perplexity.json"
DEMO_WEIGHTS = 6_291_456
"""Numbers in the matrices of the demo model's layers."""


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    from documents import table

    return table(head, rows)


def installed() -> str:
    """One row for each distribution, with its folder and what it provides."""
    rows = (
        (
            f"`{m.name}`",
            f"`{m.path}`",
            ", ".join(f"`{entry.id}`" for entry in m.entry_points),
            str(m.pyproject["project"]["description"]),
        )
        for m in members()
    )
    return _table(("Distribution", "Folder", "Provides", ""), rows)


def plugin_options() -> str:
    """Every option of a shipped plugin, below the plugin's id."""
    from documents import option_table

    sections = []
    for member in members():
        for name, struct in sorted(options_of(member).items()):
            example = toml_example(name, option_rows(struct, name))
            sections.append(f"### {name}\n\n{option_table(struct)}\n```toml\n{example}```\n")
    return "\n".join(sections)


def options_of(member: Member) -> dict[str, Any]:
    """``TREADLE_OPTIONS`` of the modules that its entry points name."""
    tables: dict[str, Any] = {}
    for name in sorted({entry.module for entry in member.entry_points}):
        file = ROOT / member.path / (name.replace(".", "/") + ".py")
        package = ROOT / member.path / name.replace(".", "/") / "__init__.py"
        source = next((f for f in (file, package) if f.is_file()), None)
        if source is not None and "TREADLE_OPTIONS" in source.read_text():
            tables |= getattr(importlib.import_module(name), "TREADLE_OPTIONS", {})
    return tables


def extras() -> str:
    """The optional dependencies of the members."""
    rows = [
        (f"`./{m.path}[{name}]`", ", ".join(f"`{r}`" for r in requirements))
        for m in members()
        for name, requirements in sorted(
            m.pyproject["project"].get("optional-dependencies", {}).items()
        )
    ]
    return _table(("Install", "Brings"), rows)


# ------------------------------------------------------------- models and quantization


def models() -> str:
    """Architectures that plugins declare, whether tests compare them, and what has run."""
    return _declared("models", "Architecture", "tests/plugins/models")


def quantization() -> str:
    """Quantization methods that plugins declare, whether tests compare them, and what has run."""
    return _declared("quantization", "`quant_method`", "tests/plugins/quantization")


def _declared(kind: str, title: str, folder: str) -> str:
    tests = "\n".join(p.read_text() for p in sorted((ROOT / folder).glob("test_*.py")))
    runs = _runs(kind)
    rows = []
    for member in members():
        for entry in member.entry_points:
            if entry.kind != kind:
                continue
            is_tested = entry.key == "*" or f'"{entry.key}"' in tests
            rows.append(
                (
                    "any other" if entry.key == "*" else f"`{entry.key}`",
                    f"`{member.name}`",
                    "yes" if is_tested else "",
                    "<br>".join(runs.get(entry.key, [])),
                )
            )
    return _table((title, "Provided by", "Compared in tests", "Ran on"), rows)


def _runs(kind: str) -> dict[str, list[str]]:
    """What ran, by key of the kind: model, device, versions and month."""
    runs: dict[str, list[str]] = {}
    for file in sorted(RUNS.glob("*.json")):
        data = json.loads(file.read_text())
        for run in data["runs"]:
            if key := run.get(kind):
                setup = f"{run['model']} on {run.get('devices', 1)} × {data['device']}"
                line = f"{setup}, torch {data['torch']}, {data['date']}"
                if line not in runs.setdefault(key, []):
                    runs[key].append(line)
    return runs


def benchmark_runs() -> str:
    """The figures of ``docs/data/runs`` as one table."""
    names = ("mixed", "bs1", "prefill", "dec32", "dec256")
    rows = []
    for file in sorted(RUNS.glob("*.json")):
        data = json.loads(file.read_text())
        for run in data["runs"]:
            best = run.get("best", [])
            cells = [
                f"**{run['tokens_per_second'][n]:,}**"
                if n in best
                else f"{run['tokens_per_second'][n]:,}"
                if n in run["tokens_per_second"]
                else "–"
                for n in names
            ]
            rows.append((run["engine"], run["model"], *cells, run.get("startup", "–")))
    return _table(("Engine", "Model shape", *names, "start-up"), rows)


def cpu_speed() -> str:
    """The figures of ``docs/data/cpu_speed.json``: those of one thread and of two, side by side."""
    columns = [(name, n) for name in ("decode", "prefill", "offline") for n in ("1", "2")]
    rows = []
    for run in json.loads(CPU_SPEED.read_text())["runs"]:
        speeds = run["tokens_per_second"]
        cells = (
            f"{speeds[name][n]:,}" if n in speeds.get(name, ()) else "–" for name, n in columns
        )
        rows.append((run["model"], run["engine"], *cells))
    return _table(("Model shape", "Engine", *(f"{name}, {n}" for name, n in columns)), rows)


def perplexities() -> str:
    """What each way to store weights takes, loses and makes of a step, from two files of ``docs/data``."""
    rows = json.loads(PERPLEXITY.read_text())["rows"]
    full = rows[0]
    # All rows have the same embeddings and norms, in 16 bits.
    others = full["bytes"] - 2 * DEMO_WEIGHTS
    head = ("Weights", "Method", "Bits for each", "Size", "Perplexity", "Loss")
    return _table(
        (*head, "1 request", "256 requests"),
        (
            (
                row["format"],
                f"`{row['method']}`",
                f"{(row['bytes'] - others) * 8 / DEMO_WEIGHTS:.2f}" if row["bytes"] else "",
                f"{row['bytes'] / 2**20:.1f} MiB" if row["bytes"] else "",
                f"{row['perplexity']:.3f}",
                f"{row['perplexity'] / full['perplexity'] - 1:+.2%}",
                *(_speeds(row["format"], row["method"], name) for name in ("bs1", "dec256")),
            )
            for row in rows
        ),
    )


def _speeds(weights: str, method: str, workload: str) -> str:
    return ", ".join(
        f"{run['tokens_per_second'][workload]:,} ({card})"
        for card, run in _quantized_runs()
        if [weights, method] in run.get("perplexity_rows", ())
        and workload in run["tokens_per_second"]
    )


def _quantized_runs() -> list[tuple[str, dict[str, Any]]]:
    cards = json.loads(QUANTIZED_SPEED.read_text())["cards"]
    return [(data["card"], run) for data in cards for run in data["runs"]]


def quantized_speed() -> str:
    """The figures of ``docs/data/quantized_speed.json``."""
    names = ("bs1", "dec32", "dec256", "prefill", "mixed")
    rows = []
    for card, run in _quantized_runs():
        speeds = run["tokens_per_second"]
        cells = (f"{speeds[name]:,}" if name in speeds else "–" for name in names)
        rows.append((card, run["weights"], f"`{run['method']}`", *cells))
    return _table(("Card", "Weights", "Method", *names), rows)


# ------------------------------------------------------------------------------ metrics


def metrics() -> str:
    """Every metric that ``/metrics`` can have under treadle's name, from the collector itself."""
    collector = Metrics("model")
    collector.exposition(EngineStats())
    rows = [(_name(f), f.type, _labels(f), f.documentation) for f in collector.collect()]
    return _table(("Metric", "Type", "Labels", ""), rows)


def metric_aliases() -> str:
    """The names of others for what is measured, with their labels."""
    rows = []
    for name in (*metric_names.vllm_names(1000), *metric_names.gen_ai_names()):
        measured = MEASURED[name.value]
        suffix = "_total" if measured.type == "counter" else ""
        labels = [*(measured.shown or measured.labels), *name.constants]
        if name.labels is not None:
            labels = [*name.labels, *name.constants]
        shown = ", ".join(f"`{label}`" for label in labels)
        rows.append((f"`{name.family}{suffix}`", f"`treadle_{name.value}{suffix}`", shown))
    return _table(("Name", "Treadle's name", "Labels"), rows)


def _name(family: Metric) -> str:
    return f"`{family.name}_total`" if family.type == "counter" else f"`{family.name}`"


def _labels(family: Metric) -> str:
    return ", ".join(f"`{label}`" for label in getattr(family, "_labelnames", ()))


BLOCKS: dict[str, Callable[[], str]] = {
    block.__name__: block
    for block in (
        installed,
        plugin_options,
        extras,
        models,
        quantization,
        benchmark_runs,
        cpu_speed,
        quantized_speed,
        perplexities,
        metrics,
        metric_aliases,
    )
}
