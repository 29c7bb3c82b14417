"""Which distribution of treadle provides which key, and where its source lies in a clone.

Written by tools/known_plugins.py from the pyprojects of the repository. DO NOT EDIT.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ("DISTRIBUTIONS", "KITS", "KNOWN", "install_hint")


def install_hint(*distributions: str) -> str:
    """Return how to install these distributions, with the kits that they depend on.

    Our own are not published, so the command installs them from a clone.
    """
    names = [name.partition("[")[0] for name in distributions]
    if not all(name in DISTRIBUTIONS for name in names):
        return f"pip install {' '.join(distributions)}"
    pairs = zip(names, distributions, strict=True)
    kits = dict.fromkeys(kit for name in names for kit in KITS.get(name, ()))
    folders = [f"'./{DISTRIBUTIONS[kit]}'" for kit in kits]
    folders += [f"'./{DISTRIBUTIONS[name]}{whole[len(name) :]}'" for name, whole in pairs]
    return f"from a clone: pip install {' '.join(folders)}"


KNOWN: Mapping[str, str] = {
    "attention:flashinfer": "treadle-attention-flashinfer",
    "attention:sdpa": "treadle-core",
    "attention:triton": "treadle-attention-triton",
    "attention:xformers": "treadle-attention-xformers",
    "commands:bench": "treadle-cli",
    "commands:chat": "treadle-cli",
    "commands:doctor": "treadle-cli",
    "commands:generate": "treadle-cli",
    "commands:models": "treadle-command-models",
    "commands:plugin": "treadle-cli",
    "commands:serve": "treadle-cli",
    "executors:inline": "treadle-core",
    "executors:processes": "treadle-executor-processes",
    "executors:ray": "treadle-executor-ray",
    "guided:llguidance": "treadle-guided-llguidance",
    "guided:lmfe": "treadle-guided-lmfe",
    "guided:outlines": "treadle-guided-outlines",
    "kernels:triton": "treadle-kernels-triton",
    "load_formats:dummy": "treadle-core",
    "load_formats:pt": "treadle-core",
    "load_formats:safetensors": "treadle-core",
    "logits_processors:repetition_window": "treadle-repetition-window",
    "model_sources:demo": "treadle-demo",
    "model_sources:file": "treadle-core",
    "model_sources:hf": "treadle-core",
    "model_sources:newest": "treadle-newest",
    "models:*": "treadle-transformers",
    "models:Gemma2ForCausalLM": "treadle-gemma",
    "models:Gemma3ForCausalLM": "treadle-gemma",
    "models:Gemma3ForConditionalGeneration": "treadle-gemma",
    "models:GemmaForCausalLM": "treadle-gemma",
    "models:LlamaForCausalLM": "treadle-llama",
    "models:MistralForCausalLM": "treadle-llama",
    "models:MixtralForCausalLM": "treadle-mixtral",
    "models:Qwen2ForCausalLM": "treadle-qwen",
    "models:Qwen3ForCausalLM": "treadle-qwen",
    "models:Qwen3MoeForCausalLM": "treadle-qwen",
    "policies:fcfs": "treadle-core",
    "policies:priority": "treadle-core",
    "quantization:awq": "treadle-awq",
    "quantization:awq_marlin": "treadle-awq",
    "quantization:fbgemm_fp8": "treadle-fp8",
    "quantization:fp8": "treadle-fp8",
    "quantization:gptq": "treadle-gptq",
    "quantization:gptq_marlin": "treadle-gptq",
    "quantization:ptpc_fp8": "treadle-fp8",
    "reasoning:deepseek_r1": "treadle-deepseek-r1",
    "reasoning:qwen3": "treadle-qwen3-reasoning",
    "renderers:jinja": "treadle-core",
    "server:plugins": "treadle-server",
    "server:tokenize": "treadle-server",
    "stat_loggers:jsonl": "treadle-stats-jsonl",
    "tokenizers:auto": "treadle-core",
    "tool_parsers:hermes": "treadle-hermes",
    "tool_parsers:llama3_json": "treadle-llama3-json",
    "tool_parsers:mistral": "treadle-mistral-tools",
    "tool_parsers:pythonic": "treadle-pythonic",
}

DISTRIBUTIONS: Mapping[str, str] = {
    "treadle-attention-flashinfer": "plugins/backends/attention/flashinfer",
    "treadle-attention-triton": "plugins/backends/attention/triton",
    "treadle-attention-xformers": "plugins/backends/attention/xformers",
    "treadle-awq": "plugins/quantization/awq",
    "treadle-cli": "cli",
    "treadle-command-models": "plugins/commands/models",
    "treadle-core": "core",
    "treadle-deepseek-r1": "plugins/reasoning/deepseek_r1",
    "treadle-demo": "plugins/model_sources/demo",
    "treadle-executor-processes": "plugins/backends/executors/mp",
    "treadle-executor-ray": "plugins/backends/executors/ray",
    "treadle-fp8": "plugins/quantization/fp8",
    "treadle-gemma": "plugins/models/gemma",
    "treadle-gptq": "plugins/quantization/gptq",
    "treadle-guided-llguidance": "plugins/backends/structured_output/llguidance",
    "treadle-guided-lmfe": "plugins/backends/structured_output/lm_format_enforcer",
    "treadle-guided-outlines": "plugins/backends/structured_output/outlines",
    "treadle-hermes": "plugins/tool_parsers/hermes",
    "treadle-kernels-triton": "plugins/backends/kernels/triton",
    "treadle-llama": "plugins/models/llama",
    "treadle-llama3-json": "plugins/tool_parsers/llama3_json",
    "treadle-mistral-tools": "plugins/tool_parsers/mistral",
    "treadle-mixtral": "plugins/models/mixtral",
    "treadle-newest": "plugins/model_sources/newest",
    "treadle-paged-attention-kit": "kits/paged_attention",
    "treadle-parsing-kit": "kits/parsing",
    "treadle-pythonic": "plugins/tool_parsers/pythonic",
    "treadle-qwen": "plugins/models/qwen",
    "treadle-qwen3-reasoning": "plugins/reasoning/qwen3",
    "treadle-repetition-window": "plugins/logits_processors/repetition_window",
    "treadle-server": "server",
    "treadle-stats-jsonl": "plugins/stat_loggers/jsonl",
    "treadle-structured-output-kit": "kits/structured_output",
    "treadle-transformers": "plugins/models/transformers",
    "treadle-triton-kit": "kits/triton",
    "treadle-worker-kit": "kits/workers",
}

KITS: Mapping[str, tuple[str, ...]] = {
    "treadle-attention-flashinfer": ("treadle-paged-attention-kit",),
    "treadle-attention-triton": ("treadle-paged-attention-kit", "treadle-triton-kit"),
    "treadle-attention-xformers": ("treadle-paged-attention-kit",),
    "treadle-deepseek-r1": ("treadle-parsing-kit",),
    "treadle-executor-processes": ("treadle-worker-kit",),
    "treadle-executor-ray": ("treadle-worker-kit",),
    "treadle-fp8": ("treadle-triton-kit",),
    "treadle-gptq": ("treadle-triton-kit",),
    "treadle-guided-llguidance": ("treadle-structured-output-kit",),
    "treadle-guided-lmfe": ("treadle-structured-output-kit",),
    "treadle-guided-outlines": ("treadle-structured-output-kit",),
    "treadle-hermes": ("treadle-parsing-kit",),
    "treadle-kernels-triton": ("treadle-triton-kit",),
    "treadle-llama3-json": ("treadle-parsing-kit",),
    "treadle-mistral-tools": ("treadle-parsing-kit",),
    "treadle-pythonic": ("treadle-parsing-kit",),
    "treadle-qwen3-reasoning": ("treadle-parsing-kit",),
}
