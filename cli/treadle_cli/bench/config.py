"""Every option of ``treadle bench``, described once, in the manner of ``treadle.config``."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

__all__ = ("BenchConfig",)

Count = Annotated[int, Meta(ge=1)]


class BenchConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is measured, how often, and in which shape of model."""

    workload: Annotated[
        list[Literal["mixed", "bs1", "prefill", "dec32", "dec256", "custom"]],
        Meta(
            description="mixed, bs1, prefill, dec32, dec256 or custom. Repeatable; one engine runs all."
        ),
    ] = msgspec.field(default_factory=lambda: ["mixed"])
    num_prompts: Annotated[Count, Meta(description="custom: number of requests.")] = 32
    input_len: Annotated[Count, Meta(description="custom: tokens of each prompt.")] = 512
    output_len: Annotated[Count, Meta(description="custom: tokens of each output.")] = 128
    num_iters: Annotated[Count, Meta(description="Timed iterations of each workload.")] = 2
    num_iters_warmup: Annotated[
        Annotated[int, Meta(ge=0)], Meta(description="Warm-up iterations, not timed.")
    ] = 1
    pick: Annotated[
        Literal["best", "median"], Meta(description="Which of the timed iterations is reported.")
    ] = "best"
    temperature: Annotated[
        Annotated[float, Meta(ge=0)], Meta(description="Temperature of the requests; 0 is greedy.")
    ] = 0.6
    max_concurrency: Annotated[
        Count | None, Meta(description="latency: most requests at a time (default: all).")
    ] = None
    request_rate: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="latency: mean arrivals per second, exponential gaps (default: at once)."),
    ] = None
    hf_config: Annotated[
        str | None,
        Meta(
            description="A config.json, its folder, or a name of benchmarks/shapes, in place of "
            "MODEL: measures the shape with random weights and without a tokenizer."
        ),
    ] = None
