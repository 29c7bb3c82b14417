"""``config.json`` with the user's overrides, its sizes bounded before anything is built.

A layer is Python objects before it is memory, and transformers makes lists of a configuration's
counts, so that a number without bounds ends in a process without memory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from treadle.api.files import ModelFiles
from treadle.errors import CheckpointError

__all__ = ("LAYERS", "MAX_LAYERS", "check_config", "config_json", "merge")

MAX_LAYERS = 4096
MAX_COUNT = 65_536
MAX_SIZE = 2**24
MAX_LENGTH = 2**31 - 1

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
# What must be an integer wherever it is given, with its upper bound.
INTEGERS: Mapping[str, int] = {
    **dict.fromkeys(LAYERS, MAX_LAYERS),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head"), MAX_COUNT),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), MAX_COUNT),
    **dict.fromkeys(("num_experts_per_tok", "n_shared_experts"), MAX_COUNT),
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "head_dim"), MAX_SIZE),
    **dict.fromkeys(("moe_intermediate_size", "n_embd", "n_inner"), MAX_SIZE),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), MAX_LENGTH),
}
# Other integers, by their names; the first pattern counts.
BOUNDS = (
    (re.compile(r"(num|n)_\w*layers?"), MAX_LAYERS),
    (re.compile(r"(num|n)_\w*(tokens|positions|len|length|ctx)"), MAX_LENGTH),
    (re.compile(r"(num|n)_\w+"), MAX_COUNT),
    (re.compile(r"\w+_(size|dim|rank)"), MAX_SIZE),
    (re.compile(r".*", re.DOTALL), 2**63 - 1),
)
# Sizes of a model without any of these would be zero.
NOT_ZERO = frozenset(
    {*LAYERS, "num_attention_heads", "n_head", "vocab_size", "hidden_size", "n_embd"}
)
# What quantization plugins read, and check.
FOREIGN = ("quantization_config", "compression_config")


def config_json(files: ModelFiles, hf_overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return ``config.json`` with overrides. Raises ``CheckpointError`` if a size is out of bounds."""
    config = merge(files.config, hf_overrides or {})
    check_config(config, files.root)
    return config


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a deep copy of ``base`` with ``changes``. Mappings are merged, others replaced."""
    merged = {k: merge(v, {}) if isinstance(v, Mapping) else v for k, v in base.items()}
    for key, value in changes.items():
        current = merged.get(key)
        if isinstance(value, Mapping):
            merged[key] = merge(current if isinstance(current, Mapping) else {}, value)
        else:
            merged[key] = value
    return merged


def check_config(config: Mapping[str, Any], origin: object) -> None:
    """Check the numbers of a configuration, also in its parts (``text_config``).

    ``origin`` is for the error message. Raises ``CheckpointError``.
    """
    for name, value in config.items():
        if name in FOREIGN:
            continue
        bound = INTEGERS.get(name)
        if bound is not None and value is not None:
            least = 1 if name in NOT_ZERO else 0
            for number in value if isinstance(value, list) else (value,):
                if number is not None and not (type(number) is int and least <= number <= bound):
                    raise CheckpointError(_wrong(origin, name, value, least, bound))
        elif isinstance(value, Mapping):
            check_config(value, origin)
        else:
            bound = next(limit for pattern, limit in BOUNDS if pattern.fullmatch(name))
            for number in value if isinstance(value, list) else (value,):
                if isinstance(number, Mapping):
                    check_config(number, origin)
                elif isinstance(number, int) and abs(number) > bound:
                    raise CheckpointError(_wrong(origin, name, number, -bound, bound))


def _wrong(origin: object, name: str, value: Any, least: int, bound: int) -> str:
    return (
        f"{name} of {origin} is {value!r:.100}; an integer from {least} to {bound} is allowed: "
        "correct config.json, or give another value with hf_overrides"
    )
