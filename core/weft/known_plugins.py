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
    "commands:plugin": "weft-cli",
    "commands:serve": "weft-cli",
    "executors:inline": "weft-core",
    "executors:processes": "weft-executor-processes",
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
    "renderers:jinja": "weft-core",
    "server:tokenize": "weft-server",
    "stat_loggers:jsonl": "weft-stats-jsonl",
    "tokenizers:auto": "weft-core",
}

DISTRIBUTIONS: frozenset[str] = frozenset(
    {
        "weft-attention-triton",
        "weft-cli",
        "weft-core",
        "weft-demo",
        "weft-executor-processes",
        "weft-kernels-triton",
        "weft-llama",
        "weft-newest",
        "weft-qwen",
        "weft-repetition-window",
        "weft-server",
        "weft-stats-jsonl",
    }
)
