"""Print the public names as they are now: ``python tools/surface.py > tests/public_surface.toml``.

Unlike what ``tools/sync.py`` writes, this is never done on the way: the difference is a promise to
users and plugin authors, and is reviewed as one.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator

from repository import ROOT, hooks

from treadle.api.sampling_params import SamplingParams, StructuredOutputsParams
from treadle.config import EngineConfig, config_sections
from treadle.testing.catalog import SUITES

__all__ = ("surface",)

KIT = sorted(p.stem for p in (ROOT / "core/treadle/testing").glob("*.py") if p.stem != "__init__")
MODULES = (
    "treadle",
    "treadle.api",
    "treadle.api.checkpoints",
    "treadle.api.isolation",
    "treadle.errors",
    *(f"treadle.testing.{name}" for name in KIT),
    "treadle_layers_kit",
    "treadle_server.surfaces",
    *sorted({suite.partition(":")[0] for suite in SUITES.values() if suite[:5] != "treadle."}),
)
CONTRACT = (
    "attention",
    "cache",
    "communicators",
    "engine",
    "files",
    "structured_output",
    "matching",
    "models",
    "parsers",
)


def surface() -> dict[str, dict[str, list[str]]]:
    """Everything that is frozen, by table and name."""
    modules = [importlib.import_module(f"treadle.api.{module}") for module in CONTRACT]
    return {
        "modules": {name: exported(name) for name in MODULES},
        "contract": {
            "types": sorted(name for module in modules for name in module.__all__),
            "hooks": [f"{hook.name}({', '.join(hook.arguments)})" for hook in hooks()],
        },
        "options": {
            name: list(kind.__struct_fields__) for name, kind in config_sections(EngineConfig)
        },
        "sampling": {
            "params": list(SamplingParams.__struct_fields__),
            "structured_outputs": list(StructuredOutputsParams.__struct_fields__),
        },
    }


def exported(module: str) -> list[str]:
    return sorted(importlib.import_module(module).__all__)


def lines(tables: dict[str, dict[str, list[str]]]) -> Iterator[str]:
    yield "# The public names of treadle; see tests/test_public_surface.py.\n"
    for table, entries in tables.items():
        yield f"\n[{table}]\n"
        for key, names in entries.items():
            yield f'"{key}" = [\n{"".join(quoted(names))}]\n'


def quoted(names: Iterable[str]) -> Iterator[str]:
    yield from (f'    "{name}",\n' for name in names)


if __name__ == "__main__":
    print("".join(lines(surface())), end="")
