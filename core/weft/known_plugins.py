"""Which distribution of weft provides which key: for ``install weft-awq`` in messages.

Written by tools/known_plugins.py from the pyprojects of the repository. DO NOT EDIT.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ("DISTRIBUTIONS", "KNOWN")

KNOWN: Mapping[str, str] = {
    "attention:sdpa": "weft-core",
    "attention:triton": "weft-attention-triton",
    "commands:bench": "weft-cli",
    "commands:chat": "weft-cli",
    "commands:doctor": "weft-cli",
    "commands:generate": "weft-cli",
    "commands:models": "weft-command-models",
    "commands:plugin": "weft-cli",
    "commands:serve": "weft-cli",
    "executors:inline": "weft-core",
    "executors:processes": "weft-executor-processes",
    "executors:ray": "weft-executor-ray",
    "guided:llguidance": "weft-guided-llguidance",
    "guided:lmfe": "weft-guided-lmfe",
    "guided:outlines": "weft-guided-outlines",
    "kernels:triton": "weft-kernels-triton",
    "load_formats:dummy": "weft-core",
    "load_formats:pt": "weft-core",
    "load_formats:safetensors": "weft-core",
    "logits_processors:repetition_window": "weft-repetition-window",
    "model_sources:demo": "weft-demo",
    "model_sources:file": "weft-core",
    "model_sources:hf": "weft-core",
    "model_sources:newest": "weft-newest",
    "models:LlamaForCausalLM": "weft-llama",
    "models:MistralForCausalLM": "weft-llama",
    "models:Qwen2ForCausalLM": "weft-qwen",
    "models:Qwen3ForCausalLM": "weft-qwen",
    "policies:fcfs": "weft-core",
    "policies:priority": "weft-core",
    "quantization:awq": "weft-awq",
    "quantization:awq_marlin": "weft-awq",
    "quantization:fbgemm_fp8": "weft-fp8",
    "quantization:fp8": "weft-fp8",
    "quantization:gptq": "weft-gptq",
    "quantization:gptq_marlin": "weft-gptq",
    "quantization:ptpc_fp8": "weft-fp8",
    "reasoning:deepseek_r1": "weft-deepseek-r1",
    "reasoning:qwen3": "weft-qwen3-reasoning",
    "renderers:jinja": "weft-core",
    "server:plugins": "weft-server",
    "server:tokenize": "weft-server",
    "stat_loggers:jsonl": "weft-stats-jsonl",
    "tokenizers:auto": "weft-core",
    "tool_parsers:hermes": "weft-hermes",
    "tool_parsers:llama3_json": "weft-llama3-json",
    "tool_parsers:mistral": "weft-mistral-tools",
    "tool_parsers:pythonic": "weft-pythonic",
}

DISTRIBUTIONS: frozenset[str] = frozenset(
    {
        "weft-attention-triton",
        "weft-awq",
        "weft-cli",
        "weft-command-models",
        "weft-core",
        "weft-deepseek-r1",
        "weft-demo",
        "weft-executor-processes",
        "weft-executor-ray",
        "weft-fp8",
        "weft-gptq",
        "weft-guided-llguidance",
        "weft-guided-lmfe",
        "weft-guided-outlines",
        "weft-hermes",
        "weft-kernels-triton",
        "weft-llama",
        "weft-llama3-json",
        "weft-mistral-tools",
        "weft-newest",
        "weft-pythonic",
        "weft-qwen",
        "weft-qwen3-reasoning",
        "weft-repetition-window",
        "weft-server",
        "weft-stats-jsonl",
    }
)
