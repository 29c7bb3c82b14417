"""The names that users and plugin authors may rely on, frozen in ``public_surface.toml``.

A new name is a promise. The file makes it a line of a diff that somebody reviews.
"""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path

import pytest
from repository import hooks

import weft
from weft.config import EngineConfig, sections
from weft.sampling.params import GuidedParams, SamplingParams

FROZEN = tomllib.loads((Path(__file__).parent / "public_surface.toml").read_text())


@pytest.mark.parametrize("module", FROZEN["modules"])
def test_exported_names_are_frozen(module: str) -> None:
    exported = importlib.import_module(module).__all__
    assert sorted(exported) == FROZEN["modules"][module]
    assert len(set(exported)) == len(exported)


@pytest.mark.parametrize("module", FROZEN["modules"])
def test_exported_names_exist(module: str) -> None:
    loaded = importlib.import_module(module)
    assert [name for name in loaded.__all__ if not hasattr(loaded, name)] == []


def test_every_public_module_is_frozen() -> None:
    assert {"weft", "weft.api", "weft.errors", "weft.layers", "weft.testing"} <= set(
        FROZEN["modules"]
    )


def test_types_of_the_contract_are_frozen() -> None:
    from weft.api import attention, cache, engine, files, guided, models, parsers, types

    parts = (attention, cache, engine, files, guided, models, parsers)
    names = sorted(name for part in parts for name in part.__all__)
    assert names == FROZEN["contract"]["types"]
    assert [name for name in names if not hasattr(types, name)] == []


def test_hooks_are_frozen() -> None:
    assert [f"{h.name}({', '.join(h.arguments)})" for h in hooks()] == FROZEN["contract"]["hooks"]


def test_options_are_frozen() -> None:
    options = {name: list(kind.__struct_fields__) for name, kind in sections(EngineConfig)}
    assert options == FROZEN["options"]


def test_sampling_parameters_are_frozen() -> None:
    assert list(SamplingParams.__struct_fields__) == FROZEN["sampling"]["params"]
    assert list(GuidedParams.__struct_fields__) == FROZEN["sampling"]["guided"]


def test_top_level_names_are_found_without_torch() -> None:
    """``dir`` of the package shows what ``__all__`` promises."""
    assert set(weft.__all__) >= {"LLM", "AsyncLLM", "SamplingParams", "WeftError"}
