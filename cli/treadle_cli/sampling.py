"""Flags over the sampling parameters that the model's checkpoint recommends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import msgspec

from treadle_cli.flags import SAMPLING, Options

if TYPE_CHECKING:
    from treadle.api.sampling_params import SamplingParams
    from treadle.entrypoints.llm import LLM

__all__ = ("sampling_params",)


def sampling_params(llm: LLM, options: Options, **defaults: Any) -> SamplingParams:
    """Return the flags over ``defaults`` of the command over the checkpoint's recommendation.

    The recommended length is not used: ``defaults`` set the length of an answer in a terminal.
    """
    recommended = msgspec.to_builtins(llm.get_default_sampling_params())
    return cast("SamplingParams", options.struct(SAMPLING, **{**recommended, **defaults}))
