"""The load format ``dummy``: random weights, from no files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.api import impl

if TYPE_CHECKING:
    from treadle.api.hookspecs import Options
    from treadle.api.types import WeightLoader

__all__ = ("treadle_load_format",)


@impl
def treadle_load_format(format: str, seed: int, options: Options) -> WeightLoader | None:
    """Return random weights; the option ``seed`` counts more than the engine's."""
    if format != "dummy":
        return None
    from treadle_dummy.weights import DummyLoader

    return DummyLoader(int(options.get("seed", seed)))
