"""Makes Triton's interpreter several times as fast: a program that interprets kernels imports this before them.

The interpreter replaces the operations of the language at each call of a function, looking through all of its names,
and computes each sum and product of integers a second time, in 64 bits, to see whether it overflows. Here it replaces
them once, and what overflows is not what a test expects.
"""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

from triton.runtime import interpreter

KEPT = SimpleNamespace(restore=lambda: None)
patch_language, patched = interpreter._patch_lang, set()
make_dtype, dtypes = interpreter._get_np_dtype, {}


def patch_once(function: Any) -> Any:
    if (names := id(function.__globals__)) not in patched:
        patch_language(function)
        patched.add(names)
    return KEPT


def get_dtype(of: Any) -> Any:
    scalar = of.scalar if of.is_block() else of
    if scalar.name not in dtypes:
        dtypes[scalar.name] = make_dtype(scalar)
    return dtypes[scalar.name]


interpreter._patch_lang = patch_once
interpreter._get_np_dtype = get_dtype
object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)
gc.set_threshold(100_000)  # nearly all that it makes is no part of a cycle
