"""What a GPTQ checkpoint says about itself.

Written by AutoGPTQ, GPTQModel (``checkpoint_format`` or ``format``, ``dynamic``), and transformers
with optimum (``modules_in_block_to_quantize``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from treadle.errors import CheckpointError, UnsupportedModelError
from treadle_layers_kit.schemes import check_method

__all__ = ("GptqConfig", "Packing", "read_config")

METHODS = ("gptq", "gptq_marlin", "auto-round")
AUTO_ROUND = ("auto_round:auto_gptq", "auto_gptq")
BITS = (2, 3, 4, 8)


@dataclass(frozen=True, slots=True)
class Packing:
    """How one layer is packed; ``group_size`` -1: all inputs share a scale and a zero point.

    ``act_order``: inputs belong to groups in any order, and the checkpoint must say in which.
    """

    bits: int
    group_size: int
    act_order: bool = False


@dataclass(frozen=True, slots=True)
class GptqConfig:
    """``zero_offset`` is what must be added to a stored zero point (1 in version 1 of the format).

    With ``sym`` all zero points are in the middle, unless a rule says otherwise.
    ``rules`` are those of ``dynamic``: the first that matches the beginning of a layer's name
    replaces values of ``default``, or (``None``) leaves the layer unquantized. If ``quantized_names`` is not
    empty, just the layers whose names end so are quantized.
    """

    default: Packing
    zero_offset: int = 1
    sym: bool = False
    head: bool = False
    rules: tuple[tuple[re.Pattern[str], Mapping[str, Any] | None], ...] = ()
    quantized_names: tuple[str, ...] = ()
    unquantized: tuple[str, ...] = ()

    def packing(self, name: str) -> Packing | None:
        """How the matrix of this name is packed; ``None``: it is not."""
        if self.quantized_names and not any(
            name == n or name.endswith(f".{n}") for n in self.quantized_names
        ):
            return None
        for pattern, changes in self.rules:
            if pattern.match(name):
                if changes is None:
                    return None
                default = self.default
                values = {
                    "bits": default.bits,
                    "group_size": default.group_size,
                    "desc_act": default.act_order,
                }
                return _packing({**values, **changes}, f"dynamic rule {pattern.pattern!r}")
        return self.default


def read_config(checkpoint: Mapping[str, Any]) -> GptqConfig:
    """Read a ``quantization_config``.

    Raises ``ConfigError`` if the checkpoint is no GPTQ checkpoint, ``UnsupportedModelError`` for a
    variant that this plugin does not read, ``CheckpointError`` for values that mean nothing.
    """
    method = check_method(checkpoint, *METHODS)
    if method == "auto-round":
        checkpoint = _from_auto_round(checkpoint)
    format = checkpoint.get("checkpoint_format") or checkpoint.get("format") or "gptq"
    if format not in ("gptq", "gptq_v2"):
        raise UnsupportedModelError(
            f"quantization_config says checkpoint_format {format!r}; treadle-gptq reads gptq and "
            "gptq_v2, so convert the checkpoint with GPTQModel"
        )
    return GptqConfig(
        default=_packing(checkpoint, "quantization_config"),
        zero_offset=int(format == "gptq"),
        sym=checkpoint.get("sym") is True,
        head=bool(checkpoint.get("lm_head", False)),
        rules=tuple(_rules(checkpoint.get("dynamic") or {})),
        quantized_names=_names(checkpoint, "modules_in_block_to_quantize"),
        unquantized=_names(checkpoint, "modules_to_not_convert"),
    )


def _from_auto_round(checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    """What auto-round says, in the words of GPTQModel; ``extra_config`` has values of single layers."""
    packing, extra = checkpoint.get("packing_format"), checkpoint.get("extra_config") or {}
    if packing not in AUTO_ROUND:
        hint = (
            "set --quantization awq" if str(packing).endswith("awq") else "export it as auto_gptq"
        )
        raise UnsupportedModelError(
            f"quantization_config says packing_format {packing!r}; treadle-gptq reads "
            f"{', '.join(AUTO_ROUND)}: {hint}"
        )
    if not isinstance(extra, Mapping) or not all(isinstance(v, Mapping) for v in extra.values()):
        raise CheckpointError("extra_config in quantization_config is not an object of layers")
    rules: dict[str, Any] = {}
    for name, values in extra.items():
        bits = values.get("bits", checkpoint.get("bits"))
        is_full = isinstance(bits, int) and bits >= 16
        pattern = f"{re.escape(name)}$"
        rules[f"-:{pattern}" if is_full else pattern] = {} if is_full else dict(values)
    return {**checkpoint, "checkpoint_format": "gptq", "dynamic": rules}


def _packing(values: Mapping[str, Any], source: str) -> Packing:
    bits, group_size = values.get("bits"), values.get("group_size", 128)
    if isinstance(bits, bool) or not isinstance(bits, int):
        raise CheckpointError(f"{source} says bits {bits!r}; it must be a whole number")
    if bits not in BITS:
        raise UnsupportedModelError(
            f"{source} says {bits} bits; treadle-gptq reads {', '.join(map(str, BITS))}"
        )
    if not isinstance(group_size, int) or (group_size < 1 and group_size != -1):
        raise CheckpointError(
            f"{source} says group_size {group_size!r}; it must be positive, or -1 for one group"
        )
    return Packing(bits, group_size, bool(values.get("desc_act")))


def _rules(dynamic: Any) -> list[tuple[re.Pattern[str], Mapping[str, Any] | None]]:
    if not isinstance(dynamic, Mapping):
        raise CheckpointError("dynamic in quantization_config is not an object of pattern: values")
    rules: list[tuple[re.Pattern[str], Mapping[str, Any] | None]] = []
    for text, values in dynamic.items():
        try:
            pattern = re.compile(text.removeprefix("-:").removeprefix("+:"))
        except re.error as error:
            raise CheckpointError(
                f"dynamic rule {text!r} in quantization_config is no regular expression: {error}"
            ) from error
        rules.append((pattern, None if text.startswith("-:") else dict(values or {})))
    return rules


def _names(checkpoint: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """A list of names, or a list of such lists, as one tuple."""
    value = checkpoint.get(key) or []
    lists = value if isinstance(value, list | tuple) else [None]
    flat = [n for entry in lists for n in (entry if isinstance(entry, list) else [entry])]
    names = tuple(n for n in flat if isinstance(n, str))
    if len(names) < len(flat):
        raise CheckpointError(f"{key} in quantization_config is not a list of names: {value!r}")
    return names
