"""What can be said about a model without loading it: one row of the table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from treadle.api.checkpoints import read_json
from treadle.api.kinds import MODELS
from treadle.errors import CheckpointError, ConfigError, PluginError, TreadleError
from treadle.plugins import PluginManager
from treadle_command_models.sources import ModelCandidate
from treadle_command_models.weights import read_weights
from treadle_worker_kit.model_config import max_model_len

__all__ = ("Row", "row")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One model. What its files do not say is ``None``."""

    model: str
    """What ``treadle serve`` is given."""
    path: str
    architecture: str | None = None
    bytes: int = 0
    """Of the weight files."""
    parameters: int | None = None
    """``None`` for quantized weights, whose tensors hold several values in one."""
    dtype: str | None = None
    context: int | None = None
    quantization: str | None = None
    plugin: str | None = None
    """The distribution that provides the architecture."""
    problem: str | None = None
    """Why it cannot run, or ``None`` if it can."""


def row(plugins: PluginManager, candidate: ModelCandidate) -> Row:
    """Describe a model. A damaged one is a row with a problem, never an error."""
    weights = read_weights(candidate.root)
    try:
        config = _config(candidate.root)
    except ValueError as error:
        return Row(
            model=candidate.name, path=str(candidate.root), bytes=weights.bytes, problem=str(error)
        )
    text = _text(config)
    architecture = next(iter(_names(config.get("architectures"))), None)
    quantized = _quantization(config) or _quantization(text)
    method = None if quantized is None else str(quantized.get("quant_method") or "unknown")
    plugin, problems = _provider(plugins, architecture)
    if method is not None:
        problems += _lacking(plugins, "quantization", method)
    problems += weights.problems
    dtype = text.get("dtype") or text.get("torch_dtype")
    dtype = dtype or config.get("dtype") or config.get("torch_dtype") or weights.dtype
    return Row(
        model=candidate.name,
        path=str(candidate.root),
        architecture=architecture,
        bytes=weights.bytes,
        parameters=weights.parameters if method is None else None,
        dtype=str(dtype).removeprefix("torch.") if dtype else None,
        context=_context(text),
        quantization=method,
        plugin=plugin,
        problem="; ".join(problems) or None,
    )


def _config(root: Path) -> dict[str, Any]:
    """Raises ``ValueError`` in words for a reader."""
    if not (root / "config.json").exists():
        raise ValueError("it has no config.json")
    try:
        return read_json(root, "config.json")
    except CheckpointError as error:
        raise ValueError(f"its config.json: {error}") from error


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part about the language model."""
    for name in ("text_config", "llm_config", "language_config"):
        if isinstance(text_config := config.get(name), dict):
            return text_config
    return config


def _names(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        yield from (name for name in value if isinstance(name, str))


def _quantization(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    for name in ("quantization_config", "compression_config"):
        if isinstance(quant_config := config.get(name), dict):
            return quant_config
    return None


def _context(text: Mapping[str, Any]) -> int | None:
    try:
        return max_model_len(SimpleNamespace(**{str(k): v for k, v in text.items()}))
    except (ConfigError, AttributeError, TypeError, ValueError, OverflowError):
        return None  # not stated, or nonsense


def _provider(plugins: PluginManager, architecture: str | None) -> tuple[str | None, list[str]]:
    if architecture is None:
        return None, ["its config.json names no architecture"]
    problems = _lacking(plugins, "models", architecture)
    if not problems and plugins.choose("models", architecture).key == "*":
        problems = _refused(plugins, architecture)
    return (None if problems else plugins.choose("models", architecture).owner), problems


def _refused(plugins: PluginManager, architecture: str) -> list[str]:
    """Why the fallback cannot serve an architecture that no other plugin has; only it knows."""
    try:
        plugins.create(MODELS, architecture, hf_config=None)
    except TreadleError as error:
        return [str(error)]
    return []


def _lacking(plugins: PluginManager, kind: str, key: str) -> list[str]:
    """Why nobody serves a key. Asks metadata; imports nothing."""
    try:
        entry = plugins.choose(kind, key)
    except PluginError as error:
        return [str(error)]
    return [] if entry.usable else [f"{entry.owner} is {entry.state}: {entry.reason}"]
