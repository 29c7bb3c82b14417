"""Every option of ``treadle bench serve``, with vLLM's names."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

__all__ = ("ServeBenchConfig",)

Count = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(ge=0, lt=1)]
Rate = Annotated[float, Meta(gt=0)]


class ServeBenchConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which server is asked what, how fast, and what becomes of the result."""

    model: Annotated[
        str | None,
        Meta(description="Name of the model (default: the first that the server lists)."),
    ] = None
    base_url: Annotated[
        str, Meta(description="The server: http://HOST:PORT, https://HOST or unix:PATH.")
    ] = "http://127.0.0.1:8000"
    endpoint: Annotated[
        Literal["completions", "chat"], Meta(description="Text completions or chat completions.")
    ] = "completions"
    header: Annotated[
        list[str], Meta(description="HTTP header to send: NAME=VALUE. Repeatable.")
    ] = msgspec.field(default_factory=list)
    dataset_name: Annotated[
        Literal["random", "sharegpt", "sonnet", "custom"],
        Meta(
            description="random words; a ShareGPT file; lines of a text file (sonnet); or prompts of "
            "a file (custom)."
        ),
    ] = "random"
    dataset_path: Annotated[
        str | None, Meta(description="File of the dataset; all but random need one.")
    ] = None
    num_prompts: Annotated[Count, Meta(description="Number of requests.")] = 100
    input_len: Annotated[
        Count, Meta(description="random, sonnet: tokens of each prompt, as the server counts them.")
    ] = 1024
    output_len: Annotated[
        Count | None,
        Meta(description="Most tokens of each answer (default: 128, or what the dataset says)."),
    ] = None
    random_range_ratio: Annotated[
        Share, Meta(description="random: lengths vary by this share in both directions.")
    ] = 0.0
    random_prefix_len: Annotated[
        Annotated[int, Meta(ge=0)],
        Meta(description="random: tokens at the start that all prompts share."),
    ] = 0
    request_rate: Annotated[
        Rate | None, Meta(description="Mean arrivals per second (default: all at once).")
    ] = None
    burstiness: Annotated[
        Rate,
        Meta(
            description="Shape of the gaps between arrivals, a gamma distribution: 1 is Poisson, less "
            "comes in bursts, more is even."
        ),
    ] = 1.0
    max_concurrency: Annotated[
        Count | None, Meta(description="Most requests at a time (default: all).")
    ] = None
    num_warmups: Annotated[
        Annotated[int, Meta(ge=0)], Meta(description="Requests before the measurement.")
    ] = 1
    temperature: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(description="Temperature of the requests (default: the server's)."),
    ] = None
    ignore_eos: Annotated[
        bool, Meta(description="Ask for answers of full length (treadle, vLLM, SGLang).")
    ] = False
    extra_body: Annotated[
        dict[str, Any], Meta(description="JSON: further fields of each request.")
    ] = msgspec.field(default_factory=dict)
    seed: Annotated[int, Meta(description="Seed of prompts and arrivals.")] = 0
    goodput: Annotated[
        list[str],
        Meta(
            description="Objective of a good request, in milliseconds: ttft:200, tpot:50 or e2el:5000. "
            "Several may follow."
        ),
    ] = msgspec.field(default_factory=list)
    result_filename: Annotated[
        str | None, Meta(description="Write the result to this JSON file, with every request.")
    ] = None
    plot: Annotated[
        str | None, Meta(description="Draw the result into this PNG file; needs matplotlib.")
    ] = None
