"""Runs the checks of a suite one by one and tells which fail: how the suites are tested."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest


def failing(
    suite: type,
    folder: Path,
    only: Mapping[str, Collection[Any]] | None = None,
    names: Collection[str] | None = None,
) -> dict[str, str]:
    """The checks that fail, and what each says. Fixtures are ``tmp_path`` and those of the suite.

    ``only`` are the values of a parametrized check's argument that are tried, ``names`` the checks, by
    default all.
    """
    failed: dict[str, str] = {}
    for number, (name, values) in enumerate(cases(suite, only or {})):
        if names is not None and name not in names:
            continue
        instance = suite()
        scratch = folder / f"check{number}"
        scratch.mkdir()
        check = getattr(instance, name)
        parameters = [p for p in inspect.signature(check).parameters if p not in values]
        try:
            check(**values, **{p: fixture(instance, p, scratch) for p in parameters})
        except pytest.skip.Exception:
            continue
        except (Exception, SystemExit, pytest.fail.Exception) as error:
            failed[name] = f"{type(error).__name__}: {error}"
    return failed


def cases(suite: type, only: Mapping[str, Collection[Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, check in inspect.getmembers(suite, inspect.isfunction):
        if not name.startswith("test_"):
            continue
        axes = [
            [(mark.args[0], v) for v in mark.args[1] if v in only.get(mark.args[0], mark.args[1])]
            for mark in getattr(check, "pytestmark", [])
            if mark.name == "parametrize"
        ]
        for chosen in itertools.product(*axes):
            yield name, dict(chosen)


def fixture(instance: Any, name: str, scratch: Path) -> Any:
    if name == "tmp_path":
        return scratch
    function = inspect.getattr_static(instance, name)._get_wrapped_function()
    parameters = [p for p in inspect.signature(function).parameters if p != "self"]
    return function(instance, **{p: fixture(instance, p, scratch) for p in parameters})
