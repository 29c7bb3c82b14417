"""The quantization `int8`: weights in int8 with one scale for each output feature."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.api import impl

if TYPE_CHECKING:
    from treadle.api.types import QuantizationScheme


@impl
def treadle_quantization(method: str) -> QuantizationScheme | None:
    if method != "int8":
        return None
    from treadle_int8.scheme import Int8

    return Int8()
