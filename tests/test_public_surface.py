"""The names that users and plugin authors may rely on, frozen in ``public_surface.toml``.

A new name is a promise. The file makes it a line of a diff that somebody reviews.
"""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path

import pytest
from surface import CONTRACT, MODULES, surface

FILE = Path(__file__).parent / "public_surface.toml"
CURRENT = surface()


@pytest.mark.parametrize("table", CURRENT)
def test_the_surface_is_frozen(table: str) -> None:
    """On purpose? Then: python tools/surface.py > tests/public_surface.toml"""
    frozen = tomllib.loads(FILE.read_text())[table]
    assert frozen.keys() == CURRENT[table].keys()
    for key, names in CURRENT[table].items():
        removed, added = set(frozen[key]) - set(names), set(names) - set(frozen[key])
        assert (removed, added) == (set(), set()), f"{table}.{key}: gone {removed}, new {added}"
        assert frozen[key] == names, f"{table}.{key} is in another order"


@pytest.mark.parametrize("module", MODULES)
def test_exported_names_exist_once(module: str) -> None:
    loaded = importlib.import_module(module)
    assert [name for name in loaded.__all__ if not hasattr(loaded, name)] == []
    assert len(set(loaded.__all__)) == len(loaded.__all__)


@pytest.mark.parametrize("part", CONTRACT)
def test_every_type_of_the_contract_is_in_types(part: str) -> None:
    from treadle.api import types

    names = importlib.import_module(f"treadle.api.{part}").__all__
    assert [name for name in names if not hasattr(types, name)] == []
