"""Tokens per second of vLLM, in the workloads of ``steps.py`` and of ``structured_output.py --guided``.

::

    python benchmarks/gpu_peers/with_vllm.py benchmarks/shapes/qwen3-8b [--workload dec256 mixed]
    python benchmarks/gpu_peers/with_vllm.py benchmarks/shapes/qwen3-8b --weights awq
    python benchmarks/gpu_peers/with_vllm.py FOLDER --workload guided32 guided256 --backend guidance

It runs with the interpreter that vLLM is installed for, where treadle need not be, on random weights. The
folder has a ``config.json``, and for the last two workloads a tokenizer. Requests go through ``LLM.generate``
with token ids, without text, as fast as vLLM takes them. The first pass of each workload is a warm-up.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

Work = tuple[list[list[int]], list[int], int]
"""Prompts, the length of each output, and the tokens that count."""

GUIDED = {"guided32": 32, "guided256": 256}
ROWS = {
    "bs1": (1, 128, 256),
    "prefill": (16, 2048, 1),
    "dec32": (32, 64, 256),
    "dec256": (256, 64, 256),
}
NAMES = (*ROWS, "mixed", *GUIDED)
TEXT = {"type": "string"}
RECORD = {
    "type": "object",
    "properties": {
        **{f"field_{i}": TEXT for i in range(6)},
        "size": {"type": "integer"},
        "kind": {"enum": ["small", "large", "other"]},
        "owner": {
            "type": "object",
            "properties": {"name": TEXT, "age": {"type": "integer"}},
            "required": ["name", "age"],
        },
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
    },
    "required": ["field_0", "field_1", "field_2", "size", "kind", "owner", "tags"],
}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
WEIGHTS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    # By name: further options of LLM, and the quantization_config of the checkpoint.
    "bfloat16": ({}, None),
    "fp8": ({"quantization": "fp8"}, None),
    "awq": (
        {},
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 128,
            "version": "gemm",
            "zero_point": True,
            "modules_to_not_convert": ["lm_head"],
        },
    ),
    "int8": (
        {},
        {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "ignore": ["lm_head"],
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {**INT8, "strategy": "channel", "dynamic": False},
                    "input_activations": {**INT8, "strategy": "token", "dynamic": True},
                }
            },
        },
    ),
}


def workload(name: str) -> Work:
    """Return the work that ``treadle bench throughput`` has under this name."""
    draw = random.Random(0)

    def ids(count: int) -> list[int]:
        return [draw.randint(0, 10000) for _ in range(count)]

    if name == "mixed":
        prompts = [ids(draw.randint(100, 1024)) for _ in range(256)]
        outputs = [draw.randint(100, 1024) for _ in range(256)]
        return prompts, outputs, sum(outputs)
    rows, length, output = ROWS[name]
    prompts = [ids(length) for _ in range(rows)]
    return prompts, [output] * rows, rows * (length if name == "prefill" else output)


def copied(folder: Path, quantization: dict[str, Any] | None, into: Path) -> str:
    """Copy the small files of ``folder``, with the ``quantization_config`` in its ``config.json``."""
    for file in folder.iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            (into / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    if quantization is not None:
        config["quantization_config"] = quantization
    (into / "config.json").write_text(json.dumps(config))
    return str(into)


def run(options: argparse.Namespace, folder: str) -> None:
    import vllm
    from vllm.sampling_params import StructuredOutputsParams

    is_guided = not GUIDED.keys().isdisjoint(options.workload)
    start = time.perf_counter()
    llm = vllm.LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=not is_guided,
        max_model_len=4096,
        max_num_seqs=256,
        enable_prefix_caching=False,
        disable_log_stats=True,
        generation_config="vllm",
        structured_outputs_config={"backend": options.backend},
        **WEIGHTS[options.weights][0],
        **options.set,
    )
    say(vllm=vllm.__version__, weights=options.weights, start_seconds=time.perf_counter() - start)
    llm.apply_model(fill_codes)

    def seconds(prompts: list[list[int]], outputs: list[int], schema: Any = None) -> float:
        params = [
            vllm.SamplingParams(
                temperature=0.6,
                max_tokens=count,
                ignore_eos=True,
                detokenize=False,
                structured_outputs=schema and StructuredOutputsParams(json=schema),
            )
            for count in outputs
        ]
        requests: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        start = time.perf_counter()
        done = llm.generate(requests, params, use_tqdm=False)
        elapsed = time.perf_counter() - start
        if [len(request.outputs[0].token_ids) for request in done] != outputs:
            raise RuntimeError("outputs are not as long as they were asked to be")
        return elapsed

    for name in options.workload:
        if name in GUIDED:
            rows = GUIDED[name]
            work = [[100 + i] * 64 for i in range(rows)], [256] * rows
            turns = [(seconds(*work), seconds(*work, RECORD)) for _ in range(options.num_iters + 1)]
            free, guided = (rows * 256 / min(turn) for turn in zip(*turns[1:], strict=True))
            say(workload=name, backend=options.backend, free=free, guided=guided)
        else:
            prompts, outputs, tokens = workload(name)
            walls = [seconds(prompts, outputs) for _ in range(options.num_iters + 1)]
            say(workload=name, tokens_per_second=tokens / min(walls[1:]))


def fill_codes(model: Any) -> None:
    """Give weights of whole numbers random ones, in place.

    VLLM's random weights leave them as memory happens to be. Numbers that are all the same take less power, and
    prompts less time.
    """
    import torch

    for parameter in model.parameters():
        if parameter.dtype in (torch.int8, torch.int32):
            limits = torch.iinfo(parameter.dtype)
            parameter.data.random_(limits.min, limits.max)


def say(**result: Any) -> None:
    rounded = {k: round(v, 1) if isinstance(v, float) else v for k, v in result.items()}
    print(json.dumps(rounded), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", type=Path, help="a model folder; its config.json is enough")
    parser.add_argument("--workload", nargs="+", choices=NAMES, default=(*ROWS, "mixed"))
    parser.add_argument("--weights", choices=WEIGHTS, default="bfloat16")
    parser.add_argument("--backend", default="xgrammar", help="of structured outputs")
    parser.add_argument("--num-iters", type=int, default=2)
    parser.add_argument(
        "--set", type=json.loads, default={}, help="further options of LLM, as JSON"
    )
    options = parser.parse_args()
    os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # for ``apply_model``
    with tempfile.TemporaryDirectory() as folder:
        run(options, copied(options.shape, WEIGHTS[options.weights][1], Path(folder)))


if __name__ == "__main__":
    main()
