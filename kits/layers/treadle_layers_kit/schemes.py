"""What the schemes of quantization plugins have in common: reading a ``quantization_config``, and what it
says of fused matrices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from treadle.api.models import ExpertsMethod, ExpertsSpec, LinearSpec
from treadle.errors import CheckpointError, ConfigError, UnsupportedModelError

__all__ = ("LinearScheme", "check_method", "listed_names", "stored_alike")

T = TypeVar("T")


class LinearScheme:
    """The part of a ``QuantizationScheme`` that concerns linear layers alone: experts and the cache
    stay as they are unless a subclass says otherwise."""

    def experts_method(self, spec: ExpertsSpec) -> ExpertsMethod | None:
        return None

    def kv_cache_dtype(self, layer: str) -> str | None:
        return None


def check_method(checkpoint: Mapping[str, Any], *methods: str) -> str:
    """Return the ``quant_method``, which is the first of ``methods`` if none is said.

    Raises ``ConfigError`` if the checkpoint is not quantized, or with another method.
    """
    method = checkpoint.get("quant_method", methods[0])
    if checkpoint and method in methods:
        return str(method)
    state = f"is quantized with {method!r}" if checkpoint else "is not quantized"
    raise ConfigError(
        f"option quantization is {methods[0]!r}, but this checkpoint {state}; leave the option out"
    )


def listed_names(
    values: Mapping[str, Any], key: str, where: str = "quantization_config"
) -> tuple[str, ...]:
    """Return a list of names of modules, empty if there is none. Raises ``CheckpointError``."""
    names = values.get(key) or ()
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{key} in {where} is not a list of names: {names!r:.200}")
    return tuple(names)


def stored_alike(spec: LinearSpec, stored: Callable[[str], T | None]) -> T | None:
    """Return how each matrix of a layer is stored, ``None``: in full.

    Raises ``UnsupportedModelError`` if a layer fuses matrices that are not stored alike.
    """
    found = {name: stored(name) for name in spec.names}
    first = found[spec.names[0]]
    if any(other != first for other in found.values()):
        raise UnsupportedModelError(
            f"{spec.prefix} fuses matrices that the checkpoint stores differently: "
            + ", ".join(
                f"{name} ({'in full' if how is None else how})" for name, how in found.items()
            )
        )
    return first
