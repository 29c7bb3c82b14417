"""Every hook, and every method of what hooks return, has a test in which it fails.

Such a test carries the mark ``fault`` with the kind and the methods that it makes fail, which may
stand anywhere in the tests::

    @pytest.mark.fault("scheduling_policies", "sort_key", "select_victim")
    def test_…

(or ``fault``, where a module gives the mark that name). ``hook`` is the hook of the kind itself. Methods are found as the plugin's author finds them, from
what the hook returns: methods and properties of protocols, callables in data, and what these return
in turn (compiler, grammar, matcher).
"""

from __future__ import annotations

import ast
import inspect
import sys
import typing
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any

import pytest
import torch
import typer
from litestar.config.app import AppConfig
from typing_extensions import get_protocol_members, is_protocol

from treadle.api import (
    attention,
    communicators,
    engine,
    files,
    models,
    parsers,
    stats,
    structured_output,
    types,
)
from treadle.api import cache as caches
from treadle.api import step_types as plan
from treadle.api.hookspecs import AllResultsHooks, FirstResultHooks
from treadle.config import EngineConfig
from treadle.plugins import installed_kinds
from treadle_cli.hookspecs import CommandHooks
from treadle_server.engine import Engine
from treadle_server.hookspecs import ServerHooks

TESTS = Path(__file__).parents[1]

FREE = frozenset({"commands", "extensions", "server"})
"""Kinds that return an object of another library, or nothing: a mark may name any part of it."""

MORE_HOOKS: dict[str, tuple[str, ...]] = {
    **{name: ("treadle_match",) for name, kind in installed_kinds().items() if kind.matches},
    "models": ("treadle_model_config",),
    "extensions": ("treadle_unconfigure", "treadle_report", "wrapper"),
}
"""What is called beside the hook that a kind is named for; a ``wrapper`` is around any other."""

# Where the names in annotations of the contract are found at run time.
NAMES: dict[str, Any] = {
    **{
        name: value
        for module in (
            attention,
            caches,
            communicators,
            engine,
            files,
            structured_output,
            models,
            parsers,
            plan,
            stats,
        )
        for name, value in vars(module).items()
    },
    "torch": torch,
    "Tensor": torch.Tensor,
    "nn": torch.nn,
    "typer": typer,
    "AppConfig": AppConfig,
    "Engine": Engine,
    "EngineConfig": EngineConfig,
    "t": types,
}


def returned(function: Callable[..., Any]) -> Any:
    module_names = vars(sys.modules[function.__module__])
    return typing.get_type_hints(function, {**module_names, **NAMES}).get("return")


def is_ours(value: Any) -> bool:
    return inspect.isclass(value) and value.__module__.startswith("treadle.")


def classes(annotation: Any) -> Iterator[Any]:
    """The classes that an annotation speaks of, looked for in unions, tuples, iterators …"""
    if typing.get_origin(annotation) is None:
        if annotation is not NoneType and inspect.isclass(annotation):
            yield annotation
        return
    for part in typing.get_args(annotation):
        yield from classes(part)


def methods(type_: Any) -> Iterator[tuple[str, Any]]:
    """``(name, what it returns)`` of everything that can be called on an object of ours."""
    if is_protocol(type_):
        for name in sorted(get_protocol_members(type_)):
            member = inspect.getattr_static(type_, name, None)
            if isinstance(member, property):
                yield name, returned(member.fget)
            elif inspect.isfunction(member):
                yield name, returned(member)
    elif is_dataclass(type_):
        hints = typing.get_type_hints(type_, NAMES)
        for field in fields(type_):
            if typing.get_origin(hints[field.name]) is Callable:
                yield field.name, typing.get_args(hints[field.name])[1]


def reachable(annotation: Any, seen: set[Any] | None = None) -> set[str]:
    """The names of all methods of what a hook returns, and of what these return."""
    seen = set() if seen is None else seen
    names: set[str] = set()
    if typing.get_origin(annotation) is Callable:  # a kernel: what is loaded is called
        return {"call"}
    for type_ in classes(annotation):
        if type_ in seen or not is_ours(type_):
            continue
        seen.add(type_)
        for name, result in methods(type_):
            names |= {name} | reachable(result, seen)
    return names


def hook_of(kind: str) -> Callable[..., Any]:
    name = installed_kinds()[kind].hook
    return next(
        getattr(specs, name)
        for specs in (FirstResultHooks, AllResultsHooks, ServerHooks, CommandHooks)
        if hasattr(specs, name)
    )


def needed(kind: str) -> set[str]:
    """Everything of a kind that may fail."""
    names = {"hook", *MORE_HOOKS.get(kind, ())} | reachable(returned(hook_of(kind)))
    for ability in installed_kinds()[kind].optional:
        names |= reachable(ability)
    return names


@cache
def marks() -> list[tuple[str, str, str]]:
    """``(kind, method, where)`` of every mark ``fault`` in the tests, read from their source."""
    rows = []
    for file in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_bytes(), filename=str(file))):
            if not isinstance(node, ast.Call):
                continue
            if ast.unparse(node.func) not in ("pytest.mark.fault", "fault"):
                continue
            location = f"{file.relative_to(TESTS)}:{node.lineno}"
            texts = [a.value for a in node.args if isinstance(a, ast.Constant)]
            assert len(texts) == len(node.args) >= 2, f"{location}: write the kind and the methods"
            rows += [(texts[0], method, location) for method in texts[1:]]
    return rows


@pytest.mark.parametrize("kind", installed_kinds())
def test_every_method_fails_in_some_test(kind: str) -> None:
    covered = {method for k, method, _ in marks() if k == kind}
    missing = sorted(needed(kind) - covered)
    assert not missing, f"no test carries fault({kind!r}, …) for {', '.join(missing)}"


def test_marks_name_what_there_is() -> None:
    problems = [
        f"{location}: {kind}.{method}"
        for kind, method, location in marks()
        if kind not in installed_kinds() or (kind not in FREE and method not in needed(kind))
    ]
    assert problems == []


def test_every_kind_is_called() -> None:
    """A kind is named where its hook is called: a promise that nobody keeps is none."""
    sources = [*TESTS.parent.glob("core/treadle/**/*.py"), *TESTS.parent.glob("server/**/*.py")]
    sources += TESTS.parent.glob("cli/treadle_cli/*.py")
    sources += TESTS.parent.glob("kits/workers/treadle_worker_kit/*.py")  # of every executor
    called = {
        name.id if isinstance(name, ast.Name) else name.attr
        for file in sources
        if "testing" not in file.parts and "api" not in file.parts
        for node in ast.walk(ast.parse(file.read_bytes()))
        if isinstance(node, ast.Call) and node.args
        for name in [node.args[0]]
        if isinstance(name, ast.Name | ast.Attribute)
    }
    assert {name.upper() for name in installed_kinds()} <= called


def test_optional_protocols_are_listed() -> None:
    optional = {
        protocol
        for protocol in vars(types).values()
        if is_ours(protocol)
        and is_protocol(protocol)
        and getattr(protocol, "_is_runtime_protocol", 0)
    }
    assert optional == {ability for kind in installed_kinds().values() for ability in kind.optional}


def test_methods_are_found_through_what_is_returned() -> None:
    """The search sees through unions, data, iterators and inherited protocols."""
    assert {
        "compile",
        "unsupported_reason",
        "matcher",
        "fill_bitmask",
        "accept_token",
        "is_accepting",
    } <= needed("structured_output")
    assert {"create", "kv_cache_shape", "build_metadata", "forward", "slot_mapping"} <= needed(
        "attention_backends"
    )
    assert {
        "linear_method",
        "experts_method",
        "apply",
        "process_weights_after_loading",
        "rename",
    } <= needed("quantization")
    assert {"decode_next", "flush", "encode", "eos_token_id"} <= needed("tokenizers")
    assert {"feed", "finish", "grammar_for_tool_choice", "call_id"} <= needed("tool_parsers")
    assert needed("kernel_ops") == {"hook", "load", "call"}
