"""Frequencies of rotary embeddings, from the ``rope_parameters`` of a configuration.

The formulas and their float32 order of operations are those of transformers 5, against which each
is tested. Everything is computed on the CPU, so that every device gets the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from treadle.errors import UnsupportedModelError

__all__ = ("frequencies", "rope_parameters")

DEFAULT_THETA = 10_000.0


@dataclass(frozen=True, slots=True)
class _Rope:
    """The inputs of a formula: what the configuration says and the sizes of the model."""

    values: Mapping[str, Any]
    kind: str
    theta: float
    head_size: int
    size: int
    max_position_embeddings: int | None
    max_model_len: int | None

    def number(self, key: str) -> float:
        value = self.values.get(key)
        if not isinstance(value, (int, float)):
            raise UnsupportedModelError(
                f"rope_parameters of type {self.kind!r} need a number {key!r}, not {value!r}"
            )
        return value

    @property
    def context(self) -> int:
        """The context that the positions were trained for."""
        value = self.values.get("original_max_position_embeddings") or self.max_position_embeddings
        if not value:
            raise UnsupportedModelError(
                f"rope_parameters of type {self.kind!r} need original_max_position_embeddings"
            )
        return int(value)

    def inv_freq(self, theta: float | None = None) -> Tensor:
        return 1.0 / ((theta or self.theta) ** self.exponents())

    def exponents(self) -> Tensor:
        return torch.arange(0, self.size, 2, dtype=torch.int64, device="cpu").float() / self.size


def rope_parameters(hf_config: Any, layer_type: str | None = None) -> dict[str, Any]:
    """The rotary parameters of a configuration, of one layer type where they differ by type.

    Reads ``rope_parameters`` and, for configurations that transformers does not know, the older
    ``rope_theta`` and ``rope_scaling``.
    """
    parameters = getattr(hf_config, "rope_parameters", None) or {}
    if layer_type is not None and isinstance(parameters.get(layer_type), Mapping):
        parameters = parameters[layer_type]
    values: dict[str, Any] = dict(getattr(hf_config, "rope_scaling", None) or {}) | dict(parameters)
    values["rope_type"] = values.get("rope_type") or values.get("type") or "default"
    for key in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
        value = getattr(hf_config, key, None)
        if values.get(key) is None and value is not None:
            values[key] = value
    return values


def frequencies(
    parameters: Mapping[str, Any],
    head_size: int,
    *,
    max_position_embeddings: int | None = None,
    max_model_len: int | None = None,
) -> tuple[Tensor, float]:
    """Angle per position of each pair, ``[rotary_size / 2]`` float32, and the factor on cos and sin.

    ``rotary_size`` is ``head_size`` times ``partial_rotary_factor``. Raises
    ``UnsupportedModelError`` for an unknown ``rope_type`` or a parameter that is missing.
    """
    rope_type = str(parameters.get("rope_type") or "default")
    partial_factor = parameters.get("partial_rotary_factor") or 1.0
    rope = _Rope(
        values=parameters,
        kind=rope_type,
        theta=float(parameters.get("rope_theta") or DEFAULT_THETA),
        head_size=head_size,
        size=head_size if rope_type == "proportional" else int(head_size * partial_factor),
        max_position_embeddings=max_position_embeddings,
        max_model_len=max_model_len,
    )
    if rope_type not in KINDS:
        raise UnsupportedModelError(
            f"the configuration says rope_type {rope_type!r}; treadle knows {', '.join(KINDS)}"
        )
    return KINDS[rope_type](rope)


def _default(rope: _Rope) -> tuple[Tensor, float]:
    return rope.inv_freq(), 1.0


def _linear(rope: _Rope) -> tuple[Tensor, float]:
    return rope.inv_freq() / rope.number("factor"), 1.0


def _dynamic(rope: _Rope) -> tuple[Tensor, float]:
    max_position_embeddings = rope.max_position_embeddings or rope.context
    length = max(max_position_embeddings, rope.max_model_len or 0)
    factor = rope.number("factor")
    base_factor = (factor * length / max_position_embeddings) - (factor - 1)
    return rope.inv_freq(rope.theta * base_factor ** (rope.size / (rope.size - 2))), 1.0


def _proportional(rope: _Rope) -> tuple[Tensor, float]:
    """All features are pairs of one turn, of which only a share moves."""
    num_rotated = int((rope.values.get("partial_rotary_factor") or 1.0) * rope.head_size // 2)
    inv_freq = rope.inv_freq()
    inv_freq[num_rotated:] = 0.0
    return inv_freq / (rope.values.get("factor") or 1.0), 1.0


def _llama3(rope: _Rope) -> tuple[Tensor, float]:
    inv_freq = rope.inv_freq()
    factor, context = rope.number("factor"), rope.context
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    wavelength = 2 * math.pi / inv_freq
    scaled_freq = torch.where(wavelength > context / low, inv_freq / factor, inv_freq)
    blend = (context / wavelength - low) / (high - low)
    blended = (1 - blend) * scaled_freq / factor + blend * scaled_freq
    is_medium = ~(wavelength < context / high) & ~(wavelength > context / low)
    return torch.where(is_medium, blended, scaled_freq), 1.0


def _yarn(rope: _Rope) -> tuple[Tensor, float]:
    context = rope.context
    factor = rope.values.get("factor") or (rope.max_position_embeddings or context) / context
    beta_fast = rope.values.get("beta_fast") or 32
    beta_slow = rope.values.get("beta_slow") or 1

    def pair(rotations: float) -> float:
        """The pair that turns this often over the trained context."""
        return (rope.size * math.log(context / (rotations * 2 * math.pi))) / (
            2 * math.log(rope.theta)
        )

    low, high = pair(beta_fast), pair(beta_slow)
    if rope.values.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.size - 1)
    if low == high:
        high += 0.001
    steps = torch.arange(rope.size // 2, dtype=torch.float32, device="cpu")
    extrapolation_factor = 1 - ((steps - low) / (high - low)).clamp(0, 1)
    powers = rope.theta ** rope.exponents()
    inv_freq = (1.0 / (factor * powers)) * (1 - extrapolation_factor) + (
        1.0 / powers
    ) * extrapolation_factor
    return inv_freq, _yarn_scaling(rope, factor)


def _yarn_scaling(rope: _Rope, factor: float) -> float:
    attention_factor = rope.values.get("attention_factor")
    if attention_factor is not None:
        return float(attention_factor)

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    mscale, mscale_all_dim = rope.values.get("mscale"), rope.values.get("mscale_all_dim")
    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)


def _longrope(rope: _Rope) -> tuple[Tensor, float]:
    """One set of factors for short engines and one for long ones."""
    context = rope.context
    is_long = (rope.max_model_len or rope.max_position_embeddings or context) > context
    name = "long_factor" if is_long else "short_factor"
    factors = rope.values.get(name)
    if not isinstance(factors, list) or len(factors) != rope.size // 2:
        raise UnsupportedModelError(
            f"rope_parameters of type 'longrope' need {rope.size // 2} numbers in {name}, "
            f"not {factors!r}"
        )
    factor_tensor = torch.tensor(factors, dtype=torch.float32, device="cpu")
    inv_freq = 1.0 / (factor_tensor * rope.theta ** rope.exponents())
    scaling = rope.values.get("attention_factor")
    if scaling is None:
        factor = rope.values.get("factor") or (rope.max_position_embeddings or context) / context
        scaling = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(context))
    return inv_freq, float(scaling)


KINDS: Mapping[str, Callable[[_Rope], tuple[Tensor, float]]] = MappingProxyType(
    {
        "default": _default,
        "linear": _linear,
        "dynamic": _dynamic,
        "yarn": _yarn,
        "llama3": _llama3,
        "longrope": _longrope,
        "proportional": _proportional,
    }
)
