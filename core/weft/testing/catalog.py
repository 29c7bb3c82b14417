"""Which suite is for which kind: for ``weft plugin test`` and for tests over all plugins."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

__all__ = ("ALONE", "SUITES", "suite_of")

SUITES: Mapping[str, str] = {
    "attention": "weft.testing.attention:AttentionSuite",
    "commands": "weft_cli.testing.commands:CommandSuite",
    "executors": "weft.testing.executors:ExecutorSuite",
    "extensions": "weft.testing.extensions:ExtensionSuite",
    "guided": "weft.testing.guided:GuidedSuite",
    "kernels": "weft.testing.kernels:KernelSuite",
    "kv_connectors": "weft.testing.connectors:KVConnectorSuite",
    "load_formats": "weft.testing.sources:LoadFormatSuite",
    "logits_processors": "weft.testing.logits:LogitsProcessorSuite",
    "lora_resolvers": "weft.testing.adapters:LoRAResolverSuite",
    "model_sources": "weft.testing.sources:ModelSourceSuite",
    "models": "weft.testing.architectures:ModelSuite",
    "multimodal": "weft.testing.multimodal:MultimodalSuite",
    "policies": "weft.testing.policies:PolicySuite",
    "proposers": "weft.testing.proposers:ProposerSuite",
    "quantization": "weft.testing.quantization:QuantizationSuite",
    "reasoning": "weft.testing.parsers:ReasoningSuite",
    "renderers": "weft.testing.text:RendererSuite",
    "server": "weft_server.testing.plugins:ServerSuite",
    "stat_loggers": "weft.testing.stats:StatLoggerSuite",
    "tokenizers": "weft.testing.text:TokenizerSuite",
    "tool_parsers": "weft.testing.parsers:ToolParserSuite",
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
