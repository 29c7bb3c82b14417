"""The structs of ``csrc/abi.h``, field by field, and the formats and instruction sets it numbers."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_double, c_float, c_int8, c_int64, c_void_p
from enum import IntEnum

__all__ = (
    "ABI",
    "MAX_TABLES",
    "Format",
    "InstructionSet",
    "Layer",
    "Levels",
    "Linear",
    "Model",
    "Step",
)

ABI = 9
MAX_TABLES = 8


class Format(IntEnum):
    """How the elements of a matrix are stored."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    INT4 = 3
    GROUPED_INT8 = 4
    GROUPED_FP8 = 5


class InstructionSet(IntEnum):
    """Of every machine, of x86-64, of aarch64; each includes those of its machine before it."""

    GENERIC = 0
    AVX2 = 1
    AVX512 = 2
    AVX512_BF16 = 3
    AMX = 4
    DOTPROD = 5
    I8MM = 6


class Levels(Structure):
    """What the codes of a weight mean, if they are not numbers themselves."""

    _fields_ = (("numbers", c_float * 16), ("multiples", c_int8 * 16), ("unit", c_float))


class Linear(Structure):
    """One linear layer: ``[n, k]`` weights, row by row."""

    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("scales", c_void_p),
        ("offsets", c_void_p),
        ("sums", c_void_p),
        ("order", c_void_p),
        ("levels", c_void_p),
        ("n", c_int64),
        ("k", c_int64),
        ("format", c_int64),
        ("group", c_int64),
    )


class Layer(Structure):
    """One decoder layer, with the addresses of its cache."""

    _fields_ = (
        ("input_norm", c_void_p),
        ("post_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("qkv", Linear),
        ("o", Linear),
        ("gate_up", Linear),
        ("down", Linear),
        ("scale", c_double),
        ("window", c_int64),
        ("table", c_int64),
    )


class Model(Structure):
    """A decoder with its embedding and output head."""

    _fields_ = (
        ("layers", POINTER(Layer)),
        ("embedding", c_void_p),
        ("final_norm", c_void_p),
        ("head", Linear),
        ("eps", c_double),
        ("num_layers", c_int64),
        ("hidden", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_size", c_int64),
        ("intermediate", c_int64),
        ("embedding_format", c_int64),
        ("cache_format", c_int64),
        ("page_size", c_int64),
    )


class Step(Structure):
    """The rows of one step; see ``tn_step``."""

    _fields_ = (
        ("slots", c_void_p),
        ("starts", c_void_p),
        ("counts", c_void_p),
        ("samples", c_void_p),
        ("prompt_ids", c_void_p),
        ("last_tokens", c_void_p),
        ("tables", c_void_p * MAX_TABLES),
        ("logits", c_void_p),
        ("columns", c_int64),
        ("rows", c_int64),
        ("num_decodes", c_int64),
    )
