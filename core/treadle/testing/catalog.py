"""Which suite is for which kind: for ``treadle plugin test`` and for tests over all plugins."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

__all__ = ("ALONE", "SUITES", "suite_of")

SUITES: Mapping[str, str] = {
    "attention": "treadle.testing.attention:AttentionSuite",
    "commands": "treadle_cli.testing.commands:CommandSuite",
    "executors": "treadle.testing.executors:ExecutorSuite",
    "extensions": "treadle.testing.extensions:ExtensionSuite",
    "guided": "treadle.testing.guided:GuidedSuite",
    "kernels": "treadle.testing.kernels:KernelSuite",
    "kv_connectors": "treadle.testing.connectors:KVConnectorSuite",
    "load_formats": "treadle.testing.sources:LoadFormatSuite",
    "logits_processors": "treadle.testing.logits:LogitsProcessorSuite",
    "lora_resolvers": "treadle.testing.adapters:LoRAResolverSuite",
    "model_sources": "treadle.testing.sources:ModelSourceSuite",
    "models": "treadle.testing.architectures:ModelSuite",
    "multimodal": "treadle.testing.multimodal:MultimodalSuite",
    "policies": "treadle.testing.policies:PolicySuite",
    "proposers": "treadle.testing.proposers:ProposerSuite",
    "quantization": "treadle.testing.quantization:QuantizationSuite",
    "reasoning": "treadle.testing.parsers:ReasoningSuite",
    "renderers": "treadle.testing.text:RendererSuite",
    "server": "treadle_server.testing.plugins:ServerSuite",
    "stat_loggers": "treadle.testing.stats:StatLoggerSuite",
    "tokenizers": "treadle.testing.text:TokenizerSuite",
    "tool_parsers": "treadle.testing.parsers:ToolParserSuite",
}
"""Kind to ``module:class``: in the distribution whose hook it is."""

TOLD = {
    "load_formats",
    "logits_processors",
    "lora_resolvers",
    "model_sources",
    "multimodal",
    "quantization",
}
ALONE = frozenset(SUITES) - TOLD
"""Kinds whose suite can run without being told anything but the key."""


def suite_of(kind: str) -> type | None:
    """The suite of a kind that can run alone, ``None`` where ``PluginSuite`` is all there is."""
    if kind not in ALONE:
        return None
    module, _, name = SUITES[kind].partition(":")
    found: type = getattr(import_module(module), name)
    return found
