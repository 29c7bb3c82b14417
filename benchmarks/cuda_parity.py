"""Does a CUDA device give the tokens that it should? Run: ``python benchmarks/cuda_parity.py``.

Tiny random checkpoints of every first-party architecture, in float32, against transformers on the
CPU: each attention backend, CUDA graphs on and off, in one mixed batch, in small chunks, with so few
pages that sequences are preempted, and, if there are two devices, shared between them. Then the sampled
distribution on the device against the exact one (chi squared). One line per case; the exit code is the
number of failures.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from treadle.api.requests import EngineRequest
from treadle.api.sampling_params import SamplingParams
from treadle.config import from_options
from treadle.engine.core import EngineCore
from treadle.plugins import PluginManager
from treadle.testing.checkpoints import make_checkpoint

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"rope_parameters": LLAMA3}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 40}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {}),
}
SHAPE = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "chunks": {"chunked_prefill_size": 7},
    "preempted": {"page_size": 16, "num_pages": 24},
}
SHARED = {"distributed_executor_backend": "mp", "tensor_parallel_size": 2}
NEW = 48


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    common = [rng.randrange(320) for _ in range(64)]
    lengths = [(0, 1), (0, 5), (16, 1), (33, 7), (64, 21), (0, 16), (64, 30), (5, 100)]
    return [
        common[:num_common] + [rng.randrange(320) for _ in range(num_random)]
        for num_common, num_random in lengths
    ]


def expected(folder: Path) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    outputs = []
    for prompt in prompts():
        with torch.inference_mode():
            # Without a mask of ones, generate hides tokens that equal the padding id.
            ids = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=NEW,
                do_sample=False,
                eos_token_id=None,
            )
        outputs.append(ids[0, len(prompt) :].tolist())
    return outputs


def run(
    core: EngineCore, requests: dict[str, tuple[list[int], SamplingParams]]
) -> dict[str, list[int]]:
    for name, (prompt, params) in requests.items():
        core.add_request(EngineRequest(name, prompt, params, time.monotonic()))
    tokens: dict[str, list[int]] = {name: [] for name in requests}
    while core.has_work:
        for output in core.step():
            if output.error is not None:
                raise RuntimeError(output.error)
            tokens[output.id] += output.token_ids
    faults = core.scheduler.check_integrity()
    if faults:
        raise RuntimeError("; ".join(faults))
    return tokens


def greedy(
    folder: Path, expected_tokens: list[list[int]], options: dict[str, Any]
) -> tuple[int, int]:
    """Sequences that equal, and preemptions."""
    config = from_options(
        model=str(folder), device="cuda", dtype="float32", gpu_memory_utilization=0.1, **options
    )
    core = EngineCore(config, PluginManager(config.plugins))
    params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    tokens = run(core, {f"r{i}": (p, params) for i, p in enumerate(prompts())})
    preemptions = core.stats.num_preemptions
    core.close()
    return sum(
        tokens[f"r{i}"] == expected_tokens[i] for i in range(len(expected_tokens))
    ), preemptions


def chi_squared(folder: Path, draws: int = 8192, **sampling: Any) -> tuple[float, int]:
    """Statistic and degrees of freedom of first tokens against the engine's own logprobs."""
    config = from_options(
        model=str(folder), device="cuda", dtype="float32", gpu_memory_utilization=0.1, seed=1
    )
    core = EngineCore(config, PluginManager(config.plugins))
    prompt = prompts()[4]
    counts = torch.zeros(320, dtype=torch.float64)
    exact = torch.zeros(320, dtype=torch.float64)
    params = SamplingParams(max_tokens=2, ignore_eos=True, **sampling)
    for start in range(0, draws, 1024):
        outputs = run(core, {f"d{start + i}": (prompt, params) for i in range(1024)})
        for tokens in outputs.values():
            counts[tokens[0]] += 1
    core.close()
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0, -1].double() / sampling["temperature"]
    filtered = logits
    if "top_k" in sampling:
        filtered = logits.masked_fill(
            logits < logits.topk(sampling["top_k"]).values[-1], -torch.inf
        )
    if "top_p" in sampling:
        probs, order = filtered.softmax(-1).sort(descending=True)
        is_filtered = probs.cumsum(-1) - probs >= sampling["top_p"]
        filtered = filtered.index_fill(0, order[is_filtered], -torch.inf)
    exact = filtered.softmax(-1) * draws
    if counts[exact == 0].sum():
        return float("inf"), 0
    # Cells with few expected draws are put together: the statistic needs at least about five.
    large = exact >= 5
    pooled = torch.stack((exact[~large].sum(), counts[~large].sum()))
    statistic = ((counts[large] - exact[large]) ** 2 / exact[large]).sum()
    num_cells = int(large.sum())
    if pooled[0] >= 5:
        statistic += (pooled[1] - pooled[0]) ** 2 / pooled[0]
        num_cells += 1
    return float(statistic), num_cells - 1


def main() -> int:
    failures = 0
    variants = VARIANTS | ({"shared": SHARED} if torch.cuda.device_count() > 1 else {})
    with tempfile.TemporaryDirectory() as scratch:
        for name, (architecture, overrides) in MODELS.items():
            folder = make_checkpoint(Path(scratch) / name, architecture, **SHAPE, **overrides)
            expected_tokens = expected(folder)
            for backend in ("sdpa", "triton"):
                for eager in (False, True):
                    for variant, options in variants.items():
                        num_equal, preempted = greedy(
                            folder,
                            expected_tokens,
                            {**options, "attention_backend": backend, "enforce_eager": eager},
                        )
                        failures += num_equal != len(expected_tokens)
                        mode = "eager" if eager else "graphs"
                        print(
                            f"{name:8} {backend:7} {mode:7} {variant:10} {num_equal}/{len(expected_tokens)} equal, "
                            f"{preempted} preemptions",
                            flush=True,
                        )
        folder = Path(scratch) / "llama"
        for sampling in (
            {"temperature": 1.0},
            {"temperature": 1.5, "top_k": 20},
            {"temperature": 1.2, "top_p": 0.8},
            {"temperature": 1.0, "top_k": 50, "top_p": 0.9},
        ):
            statistic, degrees = chi_squared(folder, **sampling)
            # Mean f, variance 2 f: five deviations above the mean happen once in millions.
            limit = degrees + 5 * (2 * max(degrees, 1)) ** 0.5
            failures += not statistic < limit
            print(
                f"sampled {sampling}: chi squared {statistic:.1f}, {degrees} degrees, limit {limit:.1f}"
            )
    print(f"{failures} failures on {torch.cuda.get_device_name()}, torch {torch.__version__}")
    return failures


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
