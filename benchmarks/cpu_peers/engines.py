"""vLLM and OpenVINO GenAI, each in an interpreter of its own and as its users get it.

::

    vllm-venv/bin/python benchmarks/cpu_peers/engines.py vllm benchmarks/shapes/llama-14m 2 3
    openvino-venv/bin/python benchmarks/cpu_peers/engines.py openvino FOLDER 2 3

The numbers are threads and runs of a workload. The last line printed is the figures, in JSON. This file has a folder to
itself, because what lies beside a script is imported in the place of packages of the same name (``kernels``).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workloads import MAX_LEN, Generate, measure


def vllm(shape: str, threads: int) -> Generate:
    """vLLM in this process, with random weights in bfloat16."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE="1",
        OMP_NUM_THREADS=str(threads),
        VLLM_LOGGING_LEVEL="WARNING",
    )
    openmp = Path(sys.prefix, "lib", "libiomp5.so")  # its manual wants this one, before all others
    if openmp.exists() and "LD_PRELOAD" not in os.environ:
        os.execve(
            sys.executable, [sys.executable, *sys.argv], os.environ | {"LD_PRELOAD": str(openmp)}
        )
    from vllm import LLM, SamplingParams

    llm = LLM(
        shape,
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=MAX_LEN,
        enable_prefix_caching=False,
    )

    def generate(prompts: Sequence[Sequence[int]], answer: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True, detokenize=False)
        inputs: Any = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = llm.generate(inputs, params, use_tqdm=False)
        check([len(output.outputs[0].token_ids) for output in outputs], answer)

    return generate


def openvino(folder: str, threads: int) -> Generate:
    """OpenVINO's ``ContinuousBatchingPipeline``, with the weights of a folder."""
    import numpy as np
    import openvino_genai as genai
    from openvino import Tensor

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1  # GB
    scheduler.enable_prefix_caching = False
    scheduler.max_num_batched_tokens = MAX_LEN
    pipeline = genai.ContinuousBatchingPipeline(
        folder, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads}
    )

    def generate(prompts: Sequence[Sequence[int]], answer: int) -> None:
        config = genai.GenerationConfig(
            max_new_tokens=answer, ignore_eos=True, do_sample=False, apply_chat_template=False
        )
        inputs = [Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        results = pipeline.generate(inputs, [config] * len(inputs))
        check([len(result.m_generation_ids[0]) for result in results], answer)

    return generate


def check(lengths: list[int], answer: int) -> None:
    """Raise ``RuntimeError`` if an answer is shorter or longer than it was to be."""
    if set(lengths) != {answer}:
        raise RuntimeError(f"answers have {lengths} tokens, not {answer} each")


PEERS = {"vllm": vllm, "openvino": openvino}


def main() -> None:
    peer, model, threads, repeats = sys.argv[1:]
    row = measure(PEERS[peer](model, int(threads)), int(repeats))
    print(f"\n{json.dumps(row)}", flush=True)
    os._exit(0)  # what they have running needs no end


if __name__ == "__main__":
    main()
