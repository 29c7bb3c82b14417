"""Engines that use one plugin of ``odd.py``, with the demo model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from treadle import LLM, SamplingParams
from treadle.config import EngineConfig, from_options
from treadle.engine.core import EngineCore
from treadle.loading.formats import pin_revisions
from treadle.outputs import CompletionOutput
from treadle.plugins import PluginManager
from treadle.text.assets import open_checkpoint, plugin_config

__all__ = (
    "EXPERTS",
    "KEYS",
    "PROMPT",
    "USE",
    "calls",
    "config",
    "failure_pattern",
    "finish",
    "healthy",
    "start",
)

ODD = Path(__file__).with_name("odd.py")
MODEL = "demo:treadle-demo"
PROMPT = [312, 284, 223, 1540]
KEYS = {"models": "OddForCausalLM"}

# Where the model is one of experts: no checkpoint is needed, the weights are random.
EXPERTS: dict[str, Any] = {
    "load_format": "dummy",
    "hf_overrides": {
        "architectures": ["OddForCausalLM"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 1,
        "sliding_window": None,
    },
}

# kind -> the options with which an engine uses the plugin
USE: dict[str, dict[str, Any]] = {
    "model_sources": {"model": "odd:treadle-demo"},
    "load_formats": {"load_format": "odd"},
    "tokenizers": {"tokenizer_mode": "odd"},
    "models": {"hf_overrides": {"architectures": ["OddForCausalLM"]}},
    "quantization": {"quantization": "odd"},
    "attention_backends": {"attention_backend": "odd"},
    "kernel_ops": {},
    "executors": {"distributed_executor_backend": "odd"},
    "scheduling_policies": {"scheduling_policy": "odd"},
    "logits_processors": {"logits_processors": ["odd"]},
    "stat_loggers": {"stat_loggers": ["odd"]},
    "structured_output": {"structured_output_backends": ["odd"]},
}


def name(kind: str) -> str:
    return f"{kind}:{KEYS.get(kind, 'odd')}"


def config(
    kind: str, method: str = "", failure: str = "RuntimeError", **options: Any
) -> EngineConfig:
    """An engine that uses the plugin of a kind, whose ``method`` goes wrong."""
    fault = {k: options.pop(k) for k in ("first_call", "times", "pid") if k in options}
    plugin_options = {name(kind): {"method": method, "failure": failure, **fault}} if method else {}
    plugin_options |= options.pop("others", {})
    use = {
        "model": MODEL,
        "cpu_threads": 1,
        "num_pages": 64,
        "device": "cpu",
        **USE[kind],
        **options,
    }
    return from_options(plugin_file=[str(ODD)], plugin_options=plugin_options, **use)


def start(plugins: PluginManager, config: EngineConfig) -> None:
    """What ``LLM`` does to start, with a plugin manager of the test; and the end, if that went well."""
    config = pin_revisions(config, plugins)
    open_checkpoint(config, plugins)
    EngineCore(config, plugins).close()


def create_plugins(config: EngineConfig) -> PluginManager:
    return PluginManager(plugin_config(config))


def failure_pattern(kind: str, method: str, cause: str = "RuntimeError: odd") -> str:
    """The pattern of every message: which plugin, from where, in which method, the pattern of the
    cause and, where the plugin's own code raised it, the line."""
    line = r"(?: \(odd\.py, line \d+\))?"
    return rf"{name(kind)} from odd\.py \w+ failed in {method}: {cause}{line}"


def calls(source: Any, kind: str, method: str) -> dict[str, int]:
    """Counts of a method by outcome; slow is ok, because other tests may keep the machine busy."""
    rows = (
        source.call_stats.rows() if isinstance(source, PluginManager) else source.stats.plugin_calls
    )
    counts: dict[str, int] = {}
    for plugin, hook, outcome, count in rows:
        if (plugin, hook) == (name(kind), method):
            outcome = "ok" if outcome == "slow" else outcome
            counts[outcome] = counts.get(outcome, 0) + count
    return counts


def finish(llm: LLM, *extra: dict[str, Any]) -> list[CompletionOutput]:
    """One request for each of ``extra``, all in one batch: what became of them."""
    plain = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
    params = [SamplingParams(**{**plain, **more}) for more in extra]
    outputs = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
    return [output.outputs[0] for output in outputs]


def healthy(llm: LLM, expected: list[int]) -> None:
    """Nothing is lost, and the next request is served as by an engine that has seen no fault."""
    (output,) = finish(llm, {})
    assert (output.finish_reason, output.token_ids) == ("length", expected), output
    assert llm.stats.num_used_pages == 0 and llm._core.scheduler.check_integrity() == []
    assert llm.stats.num_running == llm.stats.num_waiting == llm.stats.integrity_faults == 0
