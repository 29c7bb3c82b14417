"""Which suite is for which kind: for ``weft plugin test`` and for tests over all plugins."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

__all__ = ("ALONE", "SUITES", "suite_of")

SUITES: Mapping[str, str] = {
    "attention": "weft.testing.attention:AttentionSuite",
    "executors": "weft.testing.executors:ExecutorSuite",
    "extensions": "weft.testing.extensions:ExtensionSuite",
    "guided": "weft.testing.guided:GuidedSuite",
    "kernels": "weft.testing.kernels:KernelSuite",
    "load_formats": "weft.testing.sources:LoadFormatSuite",
    "logits_processors": "weft.testing.logits:LogitsProcessorSuite",
    "model_sources": "weft.testing.sources:ModelSourceSuite",
    "models": "weft.testing.architectures:ModelSuite",
    "policies": "weft.testing.policies:PolicySuite",
    "quantization": "weft.testing.quantization:QuantizationSuite",
    "reasoning": "weft.testing.parsers:ReasoningSuite",
    "renderers": "weft.testing.text:RendererSuite",
    "stat_loggers": "weft.testing.stats:StatLoggerSuite",
    "tokenizers": "weft.testing.text:TokenizerSuite",
    "tool_parsers": "weft.testing.parsers:ToolParserSuite",
}
"""Kind to ``module:class``."""

ALONE = frozenset(SUITES) - {"load_formats", "logits_processors", "model_sources", "quantization"}
"""Kinds whose suite can run without being told anything but the key."""


def suite_of(kind: str) -> type | None:
    """The suite of a kind that can run alone, ``None`` where ``PluginSuite`` is all there is."""
    if kind not in ALONE:
        return None
    module, _, name = SUITES[kind].partition(":")
    found: type = getattr(import_module(module), name)
    return found
