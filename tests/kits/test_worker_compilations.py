"""Nothing is compiled while requests are served, whatever they ask for."""

from __future__ import annotations

import itertools
import logging
import random
from pathlib import Path
from typing import Any

import pytest

from treadle import LLM, SamplingParams
from treadle.api.sampling_params import StructuredOutputsParams
from treadle.sampling.features import Features
from treadle_worker_kit.compilations import Compilations
from treadle_worker_kit.step_graphs import sampling_sets

SHAPE = Path(__file__).parents[2] / "benchmarks" / "shapes" / "qwen3-0.6b"
SCHEMA = '{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}'
CHOICES: dict[str, tuple[Any, ...]] = {
    "temperature": (0.0, 0.0, 0.6, 1.3),
    "top_k": (0, 0, 7, 100, 900),
    "top_p": (1.0, 1.0, 0.9),
    "min_p": (0.0, 0.0, 0.05),
    "presence_penalty": (0.0, 0.0, 0.0, 0.5),
    "frequency_penalty": (0.0, 0.0, 0.0, 0.5),
    "repetition_penalty": (1.0, 1.0, 1.0, 1.2),
    "logit_bias": (None, None, None, {17: 3.0, 40: -2.0}),
    "allowed_token_ids": (None, None, None, [5, 17, 90]),
    "logprobs": (None, None, None, 0, 5),
    "prompt_logprobs": (None, None, None, None, 3),
    "seed": (None, 7),
    "min_tokens": (0, 0, 2),
    "n": (1, 1, 1, 3),
}
LENGTHS = (1, 2, 3, 7, 16, 64, 130, 511, 513, 700, 1025, 2000, 2049, 3000)


def traffic(
    source: random.Random, *, with_text: bool
) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return prompts and parameters of one call, each of a value that was drawn for it."""
    count = source.choice((1, 1, 2, 3, 5, 17, 40))
    long = source.random() < 0.5
    prompts, params = [], []
    common = [source.randrange(3, 90) for _ in range(600)]
    for _ in range(count):
        length = source.choice(LENGTHS if long else LENGTHS[:8])
        start = common[: source.choice((0, 0, 16, 600))]
        prompts.append(start + [source.randrange(3, 90) for _ in range(length)])
        kind = {name: source.choice(values) for name, values in CHOICES.items()}
        if with_text and not source.randrange(4):
            kind["structured_outputs"] = StructuredOutputsParams(json=SCHEMA)
            kind["allowed_token_ids"] = None
        elif with_text and not source.randrange(4) and kind["allowed_token_ids"] is None:
            kind["bad_words"] = ["the", " a"]
        kind["max_tokens"] = source.choice((2, 5, 20))
        params.append(SamplingParams(**kind))
    return prompts, params


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        {"model": str(SHAPE), "load_format": "dummy", "skip_tokenizer_init": True},
        {"model": str(SHAPE), "load_format": "dummy", "skip_tokenizer_init": True, "quantization": "fp8", "kv_cache_dtype": "fp8_e4m3"},
        {"model": "demo:treadle-demo"},
    ],
    ids=["qwen3", "qwen3 in fp8", "demo"],
)  # fmt: skip
def test_random_traffic_compiles_nothing(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    source = random.Random(11)
    with LLM(device="cuda", gpu_memory_utilization=0.25, **options) as llm:
        caplog.set_level(logging.INFO, logger="treadle_worker_kit.compilations")
        most = llm.info.max_model_len - 64
        for _ in range(60):
            prompts, params = traffic(source, with_text="demo" in options["model"])
            llm.generate([prompt[:most] for prompt in prompts], params, use_tqdm=False)
        assert llm.stats.compilations_in_service == 0, sorted(set(caplog.messages))


def test_loaded_kernels_are_counted_until_the_counter_is_let_go(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hooks = pytest.importorskip("triton").knobs.runtime.kernel_load_end_hook
    before = list(hooks.calls)
    counter = Compilations()
    caplog.set_level(logging.INFO, logger="treadle_worker_kit.compilations")
    assert counter.count() == 0
    hooks(None, None, "norm_kernel", {}, "digest")
    hooks(None, None, "gate_kernel", {}, "digest")
    assert counter.count() == 2
    assert [record.args for record in caplog.records] == [("norm_kernel",), ("gate_kernel",)]
    del counter
    assert hooks.calls == before


@pytest.mark.parametrize("vocab_size", [20, 100, 151_936])
def test_the_last_captured_sampling_serves_whatever_clients_ask_for(vocab_size: int) -> None:
    sets = sampling_sets(vocab_size)
    for kind in itertools.product(
        (0.0, 0.7), (0, 1, 19, 33, 128, 129, 900), (1.0, 0.5), (0.0, 0.1)
    ):
        temperature, top_k, top_p, min_p = kind
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        features = Features.of(params, vocab_size)
        chosen = next(kept for kept in sets if kept | features == kept)
        assert (
            chosen.needs_thresholds == features.needs_thresholds
        )  # nobody pays for a search in vain
        assert chosen.filters == features.filters
