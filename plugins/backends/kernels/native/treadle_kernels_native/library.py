"""The library: where it is, whether it fits this machine, and its functions with their types."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_int64, c_void_p
from pathlib import Path

from treadle.errors import ConfigError
from treadle_kernels_native.structs import ABI, InstructionSet, Layer, Linear, Model, Step

__all__ = (
    "LIBRARY_NAME",
    "LibraryError",
    "choose_instruction_set",
    "instruction_sets",
    "load_library",
    "missing_reason",
)

LIBRARY_NAME = "libtreadle_native.so"


class LibraryError(Exception):
    """The library cannot be used; the message says why."""


def missing_reason() -> str | None:
    """Say why the library cannot be loaded, without loading it; ``None`` if it is there."""
    if (Path(__file__).parent / LIBRARY_NAME).is_file():
        return None
    return (
        "the library of native kernels was not built, because there was neither a C compiler (cc) nor "
        "ziglang when treadle-kernels-native was installed; install one and install it again"
    )


def load_library(path: Path | None = None) -> ctypes.CDLL:
    """Load the library of this distribution, or that of ``path``. Raises ``LibraryError``."""
    reason = missing_reason() if path is None else None
    if reason is not None:
        raise LibraryError(reason)
    path = path or Path(__file__).parent / LIBRARY_NAME
    try:
        library = ctypes.CDLL(str(path))
        functions = {
            "tn_abi": (c_int64, ()),
            "tn_has_isa": (c_int64, (c_int64,)),
            "tn_create": (c_void_p, (POINTER(Model), c_int64, c_int64, c_int64)),
            "tn_run": (None, (c_void_p, c_void_p)),
            "tn_argmax": (None, (c_void_p, c_void_p, c_void_p)),
            "tn_destroy": (None, (c_void_p,)),
            "tn_kernels_test": (c_void_p, (c_int64,)),
            "tn_attention_test": (
                None,
                (c_void_p, POINTER(Layer), POINTER(Step), c_void_p, c_void_p),
            ),
            "tn_multiply": (None, (c_void_p, POINTER(Linear), c_void_p, c_int64, c_void_p)),
        }
        for name, (result, arguments) in functions.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise LibraryError(f"the library of native kernels does not load: {error}") from error
    if library.tn_abi() != ABI:
        raise LibraryError(
            f"the library of native kernels has interface {library.tn_abi()}, not {ABI}: it is left from "
            "another version; install treadle-kernels-native again"
        )
    return library


def instruction_sets(library: ctypes.CDLL) -> list[InstructionSet]:
    """Return the instruction sets that this machine and its system allow, the best one last."""
    return [isa for isa in InstructionSet if library.tn_has_isa(isa)]


def choose_instruction_set(library: ctypes.CDLL, isa: str) -> InstructionSet:
    """Return the instruction set of the option ``isa``. Raises ``ConfigError`` if the machine lacks it."""
    *_, best = sets = instruction_sets(library)
    if isa == "auto":
        return best
    chosen = InstructionSet[isa.upper()]
    if chosen not in sets:
        raise ConfigError(
            f"option isa of kernel_ops:native is {isa!r}, which this machine lacks; its best is "
            f"{best.name.lower()!r}, and 'auto' chooses it"
        )
    return chosen
