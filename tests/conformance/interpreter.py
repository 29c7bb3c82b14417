"""Makes Triton's interpreter several times as fast: a program that interprets kernels imports this before them.

The interpreter replaces the operations of the language at each call of a function, looking through all of its names,
and computes each sum and product of integers a second time, in 64 bits, to see whether it overflows. Here it replaces
them once, and what overflows is not what a test expects.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from triton.runtime import interpreter

KEPT = SimpleNamespace(restore=lambda: None)
PRIVATE = ("_patch_lang", "_get_np_dtype")
"""Names of Triton that another version may not have: it interprets as slowly as it does then."""


def patch_once(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    patched: set[int] = set()

    def once(function: Any) -> Any:
        if (names := id(function.__globals__)) not in patched:
            patch(function)
            patched.add(names)
        return KEPT

    return once


def make_once(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    made: dict[str, Any] = {}

    def get(of: Any) -> Any:
        scalar = of.scalar if of.is_block() else of
        if scalar.name not in made:
            made[scalar.name] = make(scalar)
        return made[scalar.name]

    return get


if all(hasattr(interpreter, name) for name in PRIVATE):
    interpreter._patch_lang = patch_once(interpreter._patch_lang)
    interpreter._get_np_dtype = make_once(interpreter._get_np_dtype)
    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)
gc.set_threshold(100_000)  # nearly all that it makes is no part of a cycle
